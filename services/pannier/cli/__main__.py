"""The `pannier` command. An error is one sentence on stderr; `--debug` shows where it came from."""

import atexit
import os
import sys
from typing import Annotated, NoReturn

try:
    import typer
except ModuleNotFoundError:
    sys.exit("pannier: the commands need more than the client; install pannier[serve]")

from pannier.cli import (
    audit_dtype,
    audit_quality,
    bench_device,
    bench_kernel,
    bench_link,
    bench_offline,
    bench_overlap,
    bench_serve,
    compare_command,
    doctor,
    keys,
    plan_command,
    roles,
    serve_command,
    simulate_command,
    status,
    talk,
    top,
)
from pannier.client import ClientError
from pannier.net import NetError
from pannier.runtime.errors import PannierError

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Serves large language models with attention offloading: weights here, KV cache there.",
)
app.command()(serve_command.serve)
app.command()(talk.complete)
app.command()(talk.chat)
app.command()(status.status)
app.command()(top.top)
app.command()(doctor.doctor)
app.command()(keys.keys)
app.command()(plan_command.plan)
app.command()(compare_command.compare)
app.command()(simulate_command.simulate)
app.command()(roles.gateway)
app.command()(roles.compute)
app.command()(roles.attention)
app.command()(roles.http)

bench = typer.Typer(no_args_is_help=True, help="Measure, side by side in one run.")
bench.command()(bench_offline.offline)
bench.command()(bench_link.link)
bench.command()(bench_device.device)
bench.command()(bench_kernel.kernel)
bench.command()(bench_overlap.overlap)
bench.command()(bench_serve.serve)
app.add_typer(bench, name="bench")

audit = typer.Typer(no_args_is_help=True, help="What element types cost, in time and in accuracy.")
audit.command()(audit_dtype.dtype)
audit.command()(audit_quality.quality)
app.add_typer(audit, name="audit")


@app.callback()
def _debug(debug: Annotated[bool, typer.Option("--debug", help="Log more; show tracebacks.")] = False) -> None:
    if debug:
        os.environ["PANNIER_DEBUG"] = "1"  # for the children of `serve` too


def main() -> NoReturn:
    """Run the command line and leave with its exit code."""
    try:
        app()
    except (PannierError, NetError, ClientError) as error:
        if "PANNIER_DEBUG" in os.environ:
            raise
        print(f"pannier: {error}", file=sys.stderr)
        _leave(1)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        _leave(end.code if isinstance(end.code, int) else int(end.code is not None))
    _leave(0)


def _leave(code: int) -> NoReturn:
    """End the process without taking the interpreter apart, which is slow with torch in it.

    And some libraries then report what they leak, behind the line that says why a process ends.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
