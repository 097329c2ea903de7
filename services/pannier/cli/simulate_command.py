"""`pannier simulate`: a trace through the real scheduler, with a clock where the workers would be."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pannier.cli.report import Report
from pannier.runtime.errors import ConfigError

if TYPE_CHECKING:
    from pannier.planner import Clock, Distribution, Setup, SimulationResult, TraceRequest

ENGINE = "pannier"


def simulate(
    trace: Annotated[Path, typer.Option(help="An Azure csv or a Mooncake jsonl.")],
    form: Annotated[str, typer.Option("--format", help="azure, mooncake or auto.")] = "auto",
    plan: Annotated[
        Path | None, typer.Option(help="What pannier plan --save wrote: its devices, rates and limits.")
    ] = None,
    block_size: Annotated[int | None, typer.Option(min=1, help="Tokens in one block; 64.")] = None,
    blocks: Annotated[int | None, typer.Option(min=1, help="Of each group; as 4 H20 have room for.")] = None,
    groups: Annotated[int | None, typer.Option(min=1, help="Groups of attention workers; 1.")] = None,
    lanes: Annotated[
        int | None, typer.Option(min=1, help="Micro-batches in flight on each compute replica; 2.")
    ] = None,
    replicas: Annotated[int | None, typer.Option(min=1, help="Compute replicas; 1.")] = None,
    max_batch_tokens: Annotated[int | None, typer.Option(min=1, help="Rows in one step; 2048.")] = None,
    max_sequences: Annotated[int | None, typer.Option(min=1, help="Sequences that run at a time; 1024.")] = None,
    max_model_len: Annotated[int | None, typer.Option(min=2, help="What a group holds if not given.")] = None,
    max_waiting: Annotated[int | None, typer.Option(min=1, help="More are refused; all may wait if not given.")] = None,
    prefix_cache: Annotated[bool, typer.Option(help="Share full blocks by their content.")] = True,
    patience: Annotated[float | None, typer.Option(help="Cancel what has no token after so many seconds.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the trace's first requests.")] = None,
    repeat: Annotated[int, typer.Option(min=1, help="The trace so many times, one after the other.")] = 1,
    rate: Annotated[
        float | None, typer.Option(help="Requests a second, at random, instead of the trace's times.")
    ] = None,
    one_at_a_time: Annotated[bool, typer.Option("--one-at-a-time", help="Each when the one before is done.")] = False,
    seed: Annotated[int, typer.Option(help="Of the random arrivals.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")] = False,
) -> None:
    """Replay a trace through the scheduler, with the speed of a plan (a cost model).

    Without one it is LLaMA3-70B on 2 H100 and 4 H20 a group.
    """
    from pannier.planner import simulate as run

    if rate is not None and not rate > 0:
        raise ConfigError(f"rate is {rate}; it must be more than 0 requests a second")
    base, clock = _planned(plan, block_size, groups)
    limits: dict[str, Any] = {
        "groups": None if blocks is None else (blocks,) * (groups or len(base.groups)),
        "replicas": replicas,
        "lanes": lanes,
        "block_size": block_size,
        "max_batch_tokens": max_batch_tokens,
        "max_sequences": max_sequences,
        "max_model_len": max_model_len,
        "max_waiting": max_waiting,
        "patience_s": patience,
    }
    given = {name: value for name, value in limits.items() if value is not None}
    try:
        setup = replace(base, prefix_cache=prefix_cache, one_at_a_time=one_at_a_time, **given)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    result = run(_requests(trace, form, limit, repeat, rate, seed), setup, clock)
    if as_json:
        print(to_report(trace.name, result).to_json(ENGINE))
    else:
        _print(result)


def _planned(plan: Path | None, block_size: int | None, groups: int | None) -> "tuple[Setup, Clock]":
    """What is simulated where the options say nothing else."""
    from pannier.planner import Setup
    from pannier.planner.lamina import LLAMA3_70B_ON_2_H100_AND_4_H20, group_blocks
    from pannier.planner.saved import read_plan

    if plan is None:
        return Setup(groups=(group_blocks(block_size or 64),) * (groups or 1)), LLAMA3_70B_ON_2_H100_AND_4_H20
    saved = read_plan(plan)
    if block_size not in (None, saved.block_size):
        raise ConfigError(f"block_size is {block_size}; the plan's blocks are of {saved.block_size} tokens")
    setup = saved.setup()
    return (setup if groups is None else replace(setup, groups=(min(setup.groups),) * groups)), saved.clock


def _requests(
    trace: Path, form: str, limit: int | None, repeat: int, rate: float | None, seed: int
) -> Iterator["TraceRequest"]:
    from pannier.planner import at_rate, read_trace, repeated

    requests = repeated(lambda: islice(read_trace(trace, form), limit), repeat)
    return requests if rate is None else at_rate(requests, rate, seed)


SCALARS = {
    "requests": "requests",
    "given_up": "requests",
    "seconds": "s",
    "requests_per_s": "requests/s",
    "prompt_tokens_per_s": "tokens/s",
    "output_tokens_per_s": "tokens/s",
    "hit_rate": "of prompt tokens",
    "preemptions": "preemptions",
    "steps": "steps",
    "peak_running": "sequences",
    "peak_waiting": "requests",
    "blocks": "blocks",
    "peak_blocks": "blocks",
    "mean_blocks": "blocks",
    "compute_busy": "of the time",
    "attention_busy": "of the time",
}
"""Figures that are one number, with their units."""

DISTRIBUTIONS = {"ttft_s": "s", "tpot_s": "s", "queueing_s": "s", "batch": "sequences", "step_rows": "rows"}
"""Figures that are many."""

STATISTICS = ("mean", "p50", "p90", "p99", "largest")


def to_report(case: str, result: "SimulationResult") -> Report:
    """The long form that every measuring command prints."""
    report = Report("simulate")
    for name, unit in SCALARS.items():
        report.add(case, ENGINE, name, unit, [float(getattr(result, name))])
    for code, count in result.refused.items():
        report.add(case, ENGINE, f"refused_{code}", "requests", [float(count)])
    for name, unit in DISTRIBUTIONS.items():
        for statistic in STATISTICS:
            report.add(case, ENGINE, f"{name}_{statistic}", unit, [getattr(getattr(result, name), statistic)])
    return report


def _print(result: "SimulationResult") -> None:
    from rich.console import Console
    from rich.table import Table

    figures = Table(box=None, pad_edge=False, show_header=False)
    for name, unit in SCALARS.items():
        figures.add_row(_words(name), f"{getattr(result, name):.6g}", unit)
    for code, count in result.refused.items():
        figures.add_row(f"refused, {code}", str(count), "requests")
    spread = Table(box=None, pad_edge=False)
    for column in ("", *STATISTICS, "unit"):
        spread.add_column(column)
    for name, unit in DISTRIBUTIONS.items():
        distribution: Distribution = getattr(result, name)
        spread.add_row(_words(name), *(f"{getattr(distribution, each):.4g}" for each in STATISTICS), unit)
    console = Console(highlight=False)
    console.print(figures)
    console.print()
    console.print(spread)


def _words(name: str) -> str:
    return name.replace("_per_s", " a second").removesuffix("_s").replace("_", " ")
