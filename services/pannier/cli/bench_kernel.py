"""`pannier bench kernel`: the operators beside what memory and processor give at most, and beside torch's own."""

import gc
import os
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Annotated

import typer

from pannier.cli.kernel_report import CONTIGUOUS, MACHINE, PAGED, SHARES, UNITS, print_summary, roofline
from pannier.cli.kernel_shapes import GEMM, GROUPS, STREAM, Shape
from pannier.cli.report import Report
from pannier.runtime.errors import ConfigError
from pannier.runtime.host import host_memory

if TYPE_CHECKING:
    from pannier.cli.kernel_ceilings import Ceilings
    from pannier.cli.kernel_engines import Call

SLOWER = 2.0
"""A form of torch that takes so many times as long as the best of its kind, when each is tried, isn't timed further."""
MEMORY_SHARE = 0.9
"""Of what is free, for the largest shape."""

Rates = dict[str, list[float]]


def kernel(
    shapes: Annotated[str, typer.Option(metavar="|".join(GROUPS), help="Some, with commas.")] = ",".join(GROUPS),
    repeats: Annotated[int, typer.Option(min=1, help="Alternating repeats of each engine.")] = 3,
    seconds: Annotated[float, typer.Option(min=0, help="Of each repeat; one call at least.")] = 0.1,
    budget: Annotated[float, typer.Option(min=0, help="Seconds, after which no further shape is begun.")] = 150.0,
    threads: Annotated[int | None, typer.Option(min=1, help="As many as torch takes, if not given.")] = None,
    cpu_time: Annotated[
        bool, typer.Option(help="One thread and its own time, where others use the machine too.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the roofline into this .svg.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")] = False,
) -> None:
    """Time the operators on this CPU: as a share of a read stream or of a bf16 GEMM, and beside torch's attention."""
    listed = listed_shapes(shapes)
    if plot is not None and plot.suffix != ".svg":
        raise ConfigError(f"--plot is {plot}; it must end with .svg")
    check_memory(listed)
    threads = 1 if cpu_time else threads
    report = _run(listed, threads, repeats=repeats, seconds=seconds, budget=budget, cpu_time=cpu_time)
    print_summary(report, listed)
    if plot is not None:
        plot.write_text(roofline(report, listed), encoding="utf-8")
    if as_json:
        print(report.to_json(CONTIGUOUS, PAGED))


def listed_shapes(groups: str) -> list[Shape]:
    """The shapes of the named groups."""
    names = groups.split(",")
    if unknown := [name for name in names if name not in GROUPS]:
        raise typer.BadParameter(f"{unknown[0]!r} is none of {', '.join(GROUPS)}", param_hint="--shapes")
    return [shape for name in dict.fromkeys(names) for shape in GROUPS[name]]


def check_memory(shapes: list[Shape]) -> None:
    """Raises `ConfigError` if there isn't enough for the largest shape."""
    from pannier.cli.kernel_engines import memory_bytes

    free = host_memory().free
    largest = max(shapes, key=memory_bytes)
    if memory_bytes(largest) > free * MEMORY_SHARE:
        group = next(name for name, group in GROUPS.items() if largest in group)
        raise ConfigError(
            f"{largest.name}: it takes {memory_bytes(largest) / 2**30:.1f} GiB, and {free / 2**30:.1f} are free; "
            f"leave {group!r} out of --shapes"
        )


def _run(
    shapes: list[Shape], threads: int | None, *, repeats: int, seconds: float, budget: float, cpu_time: bool
) -> Report:
    import torch

    from pannier.cli.kernel_ceilings import Ceilings
    from pannier.cli.kernel_engines import is_offered
    from pannier.ops import cpu_isa

    if threads is not None:
        torch.set_num_threads(threads)
    facts = {"threads": torch.get_num_threads(), "time": "of one thread" if cpu_time else "of the wall clock"}
    facts |= {"build": cpu_isa().name or "none", "load before": _load()}
    report = Report("bench kernel", settings={MACHINE: facts, CONTIGUOUS: {}, PAGED: {}})
    with torch.inference_mode():
        ceilings = Ceilings(time.thread_time if cpu_time else time.perf_counter)
        end = time.monotonic() + budget
        for shape in shapes:
            if not is_offered(shape.dtype):
                facts[shape.dtype] = "not offered by the operators"
            elif time.monotonic() > end:
                facts[shape.name] = "left out, as time was up"
            else:
                print(shape.name, file=sys.stderr)
                _measure(report, shape, ceilings, repeats, seconds)
                gc.collect()  # before the next one takes its memory
        for ceiling in (STREAM, GEMM):
            ceilings.sample(ceiling, seconds)
            report.add(MACHINE, ceiling, *UNITS[ceiling], ceilings.found[ceiling])
    facts["load after"] = _load()
    return report


def _measure(report: Report, shape: Shape, ceilings: "Ceilings", repeats: int, seconds: float) -> None:
    """Ours between two samples of what it is to be a share of, then torch's forms, over and over."""
    from pannier.cli.kernel_engines import engines

    found = engines(shape)
    amount = (shape.flops if shape.ceiling == GEMM else shape.bytes) / 1e9
    forms = {CONTIGUOUS: _fastest(found.contiguous, ceilings), PAGED: _fastest(found.paged, ceilings)}
    _fastest(found.ours, ceilings)  # first calls plan and take memory
    ours: Rates = defaultdict(list)
    shares: Rates = defaultdict(list)
    torchs: dict[str, Rates] = {kind: defaultdict(list) for kind in forms}
    for _ in range(repeats):
        before = ceilings.sample(shape.ceiling, seconds)
        for name, call in found.ours.items():
            ours[name].append(ceilings.rate(call, amount, seconds))
        ceiling = mean((before, ceilings.sample(shape.ceiling, seconds)))
        for name in found.ours:
            shares[name].append(ours[name][-1] / ceiling)
        for kind, calls in forms.items():
            for form, call in calls.items():
                torchs[kind][form].append(ceilings.rate(call, amount, seconds))
    _report(report, shape, ours, shares, torchs)


def _fastest(forms: Mapping[str, "Call"], ceilings: "Ceilings") -> dict[str, "Call"]:
    """Those that aren't much slower than the fastest one when each is called once."""
    once = {name: ceilings.rate(call, 1.0, seconds=0.0) for name, call in forms.items()}
    return {name: call for name, call in forms.items() if once[name] * SLOWER >= max(once.values())}


def _report(report: Report, shape: Shape, ours: Rates, shares: Rates, torchs: dict[str, Rates]) -> None:
    for name, repeats in ours.items():
        report.add(shape.name, name, *UNITS[shape.ceiling], repeats)
        report.add(shape.name, name, SHARES[shape.ceiling], "", shares[name])
    for kind, forms in torchs.items():
        if forms:
            best = max(forms, key=lambda form: median(forms[form]))
            report.add(shape.name, kind, *UNITS[shape.ceiling], forms[best])
            report.settings[kind][shape.name] = best


def _load() -> str:
    return "{:.1f} {:.1f} {:.1f}".format(*os.getloadavg())
