"""`pannier serve`: gateway, compute and attention workers as children of this process, until it is told to stop."""

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path

from pannier.cli.display import Display
from pannier.cli.run_folder import run_folder
from pannier.cli.stack import ServeOptions, Stack, plan
from pannier.cli.supervisor import Children, Command
from pannier.client import AsyncClient, ClientError
from pannier.runtime.config import AttentionConfig, ComputeConfig, GatewayConfig, HttpConfig, to_toml
from pannier.runtime.model_source import resolve
from pannier.runtime.signals import StopRequests
from pannier.runtime.tasks import first_end

DRAIN_S = 30.0
INTERRUPTED_DRAIN_S = 1.0
"""Who presses Ctrl-C doesn't want to wait for other people's text."""
POLL_S = 0.05
CAUSE_S = 0.5

Work = Callable[[AsyncClient, str], Awaitable[None]]
"""What to do with a stack that is ready, given a client and the clients' endpoint; the stack ends with it."""


async def serve(options: ServeOptions, work: Work, *, verbose: bool = False) -> signal.Signals | None:
    """Start the stack, work with it and stop it, whatever happens; the signal that cut the work short, if one did.

    Raises `ConfigError`, `ModelError`, or `ChildEnded` when a process of the stack has ended by itself.
    """
    resolve(options.model)  # a model that isn't there is found before four processes are started for it
    stop = StopRequests()
    with run_folder() as folder, Display(verbose=verbose) as display:
        stack = plan(options, folder)
        async with Children(commands(stack, folder), display.line, DRAIN_S) as children:
            stop.second.add_done_callback(lambda _: children.kill())
            try:
                await first_end(
                    _work_when_ready(stack.gateway, children, display, work), children.first_end(), _asked(stop)
                )
            except ClientError:
                with suppress(TimeoutError):
                    async with asyncio.timeout(CAUSE_S):
                        await children.first_end()  # the cause, if the work failed for want of a child
                raise
            if stop.first.done() and stop.first.result() is signal.SIGINT:
                children.drain_s = INTERRUPTED_DRAIN_S
    return stop.first.result() if stop.first.done() else None


async def _work_when_ready(gateway: GatewayConfig, children: Children, display: Display, work: Work) -> None:
    async with AsyncClient(gateway.client_endpoint, insecure=gateway.insecure, keys=gateway.used_keys) as client:
        while not await is_ready(client, children.pid("gateway")):  # noqa: ASYNC110  # it is another process's event
            await asyncio.sleep(POLL_S)
        display.ready()
        await work(client, gateway.client_endpoint)


async def is_ready(client: AsyncClient, gateway_pid: int) -> bool:
    """Whether our own gateway, not another that had the port before, answers that it is ready."""
    try:
        status = await client.status()
    except ClientError:
        return False  # not there yet
    pids = [process["pid"] for process in status["processes"] if process["role"] == "gateway"]
    return bool(status["ready"]) and pids == [gateway_pid]


async def _asked(stop: StopRequests) -> None:
    await asyncio.wait((stop.first,))


def commands(stack: Stack, folder: Path, workers_environment: Mapping[str, str] | None = None) -> list[Command]:
    """The front is stopped first, then the gateway: its requests need the workers to finish."""
    environment = workers_environment or {}
    return [
        *([] if stack.http is None else [_command(stack.http, "http", folder, {}, rank=-1, threads=1)]),
        _command(stack.gateway, "gateway", folder, {}, rank=0, threads=1),
        *(_command(each, each.name, folder, environment, rank=1, threads=each.threads or 1) for each in stack.workers),
    ]


def _command(
    config: GatewayConfig | ComputeConfig | AttentionConfig | HttpConfig,
    name: str,
    folder: Path,
    environment: Mapping[str, str],
    *,
    rank: int,
    threads: int,
) -> Command:
    file = folder / f"{name}.toml"
    file.write_text(to_toml(config))
    arguments = [sys.executable, "-m", "pannier.cli", config.role, "--config", str(file), "--supervised"]
    variables = {
        # Set before torch is imported: OpenMP makes its pool once. A user's own setting stays.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
        "TQDM_DISABLE": "1",  # libraries' progress bars; ours are events
        **environment,
    }
    return Command(name, arguments, rank, variables)
