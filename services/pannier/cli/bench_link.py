"""`pannier bench link`: round trips and throughput of the links from compute to attention, beside plain TCP."""

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pannier.cli.link_cases import Case, Geometry, size_of
from pannier.cli.report import Report

if TYPE_CHECKING:
    from pannier.cli.link_ends import End

PLAIN = "plain tcp"
SIZES = "16K,64K,128K,1M,8M"
FEWEST, MOST, BYTES = 24, 1000, 64 << 20
"""Exchanges in a repeat: so many bytes of them."""

Found = dict[tuple[Case, str, str], list[float]]
"""Repeats of a case, an engine and a metric."""


def link(
    sizes: Annotated[str, typer.Option(metavar="SIZE,...", help="Of the messages, each way.")] = SIZES,
    model: Annotated[str | None, typer.Option(help="What this model's steps need of a link, too.")] = None,
    rows: Annotated[int, typer.Option(min=1, help="Decode rows of its steps.")] = 32,
    flows: Annotated[int, typer.Option(min=1, max=16, help="Time links with so many connections, too.")] = 1,
    repeats: Annotated[int, typer.Option(min=1, help="Alternating repeats of each link.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")] = False,
) -> None:
    """Time every kind of link on this machine, from small messages to large, and what a model's steps need of it."""
    try:
        cases = [Case.equal(size_of(size)) for size in sizes.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"{sizes!r} is not a list such as {SIZES}", param_hint="--sizes") from error
    geometry = None if model is None else Geometry.of(model)
    if geometry is not None and model is not None:
        cases.append(geometry.case(model, rows))
    report = Report("bench link", settings={"machine": {"load before": _load()}})
    with tempfile.TemporaryDirectory(prefix="pannier-bench-") as folder, every_link(Path(folder), cases, flows) as ends:
        _report(report, _measure(ends, cases, repeats))
    if geometry is not None:
        _report_need(report, geometry, cases[-1], rows)
    report.settings["machine"]["load after"] = _load()
    report.print(PLAIN)
    if as_json:
        print(report.to_json(PLAIN))


def _measure(ends: "dict[str, End]", cases: list[Case], repeats: int) -> Found:
    """Every case over every link, over and over in turn, so that what else the machine does meets all alike."""
    found: Found = defaultdict(list)
    for case in cases:
        count = max(FEWEST, min(MOST, BYTES // case.size))
        for repeat in range(-1, repeats):  # the first one is for warming up
            for name, end in ends.items():
                times, one_way_s = end.round_trips(case, count), end.one_way(case, count)
                if repeat >= 0:
                    found[case, name, "round_trip_us"].append(median(times) * 1e6)
                    found[case, name, "one_way_gb_per_s"].append(count * case.size / one_way_s / 1e9)
    return found


def _report(report: Report, found: Found) -> None:
    for (case, name, metric), repeats in found.items():
        report.add(case.name, name, metric, "us" if metric == "round_trip_us" else "GB/s", repeats)


def _report_need(report: Report, geometry: Geometry, case: Case, rows: int) -> None:
    """What a step sends, and how long each link is at it when nothing hides behind anything else."""
    sent = geometry.step_bytes(rows)
    for row in [row for row in report.rows if row.case == case.name and row.metric == "round_trip_us"]:
        seconds = [each * geometry.calls / 1e6 for each in row.repeats]
        report.add(case.name, row.engine, "transfer_ms_per_step", "ms", [each * 1e3 for each in seconds])
        report.add(case.name, row.engine, "step_gb_per_s", "GB/s", [sent / each / 1e9 for each in seconds])
    report.add(case.name, "needed", "tensor_bytes_per_step", "bytes", [sent])
    for step_ms in (10, 100):
        report.add(case.name, "needed", f"gb_per_s_for_steps_of_{step_ms}_ms", "GB/s", [sent / step_ms / 1e6])


@contextmanager
def every_link(folder: Path, cases: list[Case], flows: int = 1) -> "Iterator[dict[str, End]]":
    """Links of all kinds to one other process, which ends with this."""
    import torch
    import zmq

    from pannier.cli.link_ends import LinkEnd, PlainEnd
    from pannier.cli.link_kinds import open_links

    torch.set_num_threads(1)
    with ExitStack() as closing:
        places = closing.enter_context(_other_process(folder))
        context: zmq.Context[zmq.Socket[bytes]] = closing.enter_context(zmq.Context())
        plain = PlainEnd(places["plain"])
        closing.callback(plain.close)
        ends: dict[str, End] = {PLAIN: plain}
        room = 8 * max(case.size for case in cases) + (1 << 20)
        for name, link, waiting in open_links(context, places, room, flows):
            closing.callback(link.close)
            ends[name] = LinkEnd(link, waiting)
        yield ends


@contextmanager
def _other_process(folder: Path) -> Iterator[dict[str, Any]]:
    """Where the other process listens."""
    command = [sys.executable, "-m", "pannier.cli.link_echo", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        with other.stdin:
            yield json.loads(other.stdout.readline())


def _load() -> str:
    return "{:.1f} {:.1f} {:.1f}".format(*os.getloadavg())
