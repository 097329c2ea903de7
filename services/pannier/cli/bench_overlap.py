"""`pannier bench overlap`: what two lanes hide, how near that is to what is possible, and whether offloading pays."""

import asyncio
import sys
import tempfile
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pannier.cli.engines import Running, running
from pannier.cli.load import Load, vocab_size
from pannier.cli.options_emulate import (
    EmulateAttention,
    EmulateBandwidth,
    EmulateCompute,
    EmulateDelay,
    EmulateRate,
)
from pannier.cli.overlap_report import overlap_report
from pannier.cli.overlap_run import Run, run
from pannier.cli.timeline_plot import check_plot, lines, write_plot

if TYPE_CHECKING:
    from pannier.cli.stack import ServeOptions

WARM_UP_TOKENS = 8
PLOTTED_STEPS = 3
"""Lane-steps of each lane in a picture."""


@dataclass(frozen=True)
class Setup:
    """One engine to be timed: a stack, and how many requests it gets."""

    options: "ServeOptions"
    requests: int


def overlap(
    model: Annotated[str, typer.Option(help="A folder, 'embedded', or random:SHAPE.")] = "embedded",
    requests: Annotated[int, typer.Option(min=1, help="Rows of each lane-step.")] = 8,
    context: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 64,
    output: Annotated[int, typer.Option(min=12, help="Tokens of each completion.")] = 64,
    lanes: Annotated[str, typer.Option(metavar="N,...", help="Lanes to compare, each with as many rows.")] = "1,2",
    replicas: Annotated[int, typer.Option(min=1, help="Compute workers, which share the attention workers.")] = 1,
    attention: Annotated[str, typer.Option(help="Attention workers, as in `serve`.")] = "1",
    kv_budget: Annotated[
        str | None, typer.Option(metavar="SIZE", help="For KV on the monolithic device, as in 64MiB.")
    ] = None,
    pin: Annotated[bool, typer.Option("--pin", help="Keep each worker to CPU cores of its own.")] = False,
    link: Annotated[str | None, typer.Option(metavar="auto|shm|zmq", help="As in `serve`.")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float32 or float16.")] = "bfloat16",
    emulate_compute: EmulateCompute = None,
    emulate_attention: EmulateAttention = None,
    emulate_rate: EmulateRate = None,
    emulate_delay: EmulateDelay = None,
    emulate_bandwidth: EmulateBandwidth = None,
    repeats: Annotated[int, typer.Option(min=1, help="Alternating repeats of each engine.")] = 3,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.svg|.png|.json", help="Draw the lanes over time; json is for Perfetto.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")] = False,
) -> None:
    """Time lane-steps with one lane and with two beside monolithic: exposed time, bound, and whether offloading pays.

    The attention of monolithic is emulated like that of the attention workers; a link it has none.
    """
    from pannier.cli.stack import ServeOptions

    if plot is not None:
        check_plot(plot)
    counts = [_count(lanes, part) for part in lanes.split(",")]
    emulated = {
        "emulate_compute": emulate_compute,
        "emulate_attention": emulate_attention,
        "emulate_rate": emulate_rate,
        "emulate_delay": emulate_delay,
        "emulate_bandwidth": emulate_bandwidth,
    }
    most = requests * max(counts) * replicas
    base = ServeOptions(
        model=model, dtype=dtype, pin=pin, link=link, max_sequences=most, max_batch_tokens=max(512, most),
        emulate_compute=emulate_compute, emulate_attention=emulate_attention, emulate_rate=emulate_rate,
        emulate_delay=emulate_delay, emulate_bandwidth=emulate_bandwidth,
    )  # fmt: skip
    setups = {
        f"{count} lane{'s' * (count > 1)}": Setup(
            replace(base, compute=",".join(["cpu"] * replicas), attention=attention, lanes=count),
            requests * count * replicas,
        )
        for count in counts
    }
    if replicas == 1:
        monolithic = replace(base, monolithic=True, attention_memory=kv_budget, link=None, emulate_delay=None)
        setups["monolithic"] = Setup(replace(monolithic, emulate_bandwidth=None), most)
    with tempfile.TemporaryDirectory(prefix="pannier-timelines-") as folder:
        found = asyncio.run(_measure(setups, Load.equal(1, context, output), repeats, Path(folder) if plot else None))
        if plot is not None:
            _draw(plot, Path(folder), found)
    case = f"{model} {requests} rows a lane, {context}+{output} tokens" + f", {replicas} replicas" * (replicas > 1)
    named = {name.removeprefix("emulate_"): value for name, value in emulated.items() if value is not None}
    report = overlap_report(case, found, named)
    report.print("1 lane", "monolithic")
    if as_json:
        print(report.to_json("1 lane", "monolithic"))


def _count(option: str, part: str) -> int:
    if not part.isdecimal() or not 1 <= int(part) <= 8:
        raise typer.BadParameter(f"{option!r} is not one or more numbers from 1 to 8", param_hint="--lanes")
    return int(part)


async def _measure(setups: dict[str, Setup], load: Load, repeats: int, timelines: Path | None) -> dict[str, list[Run]]:
    vocabulary = vocab_size(next(iter(setups.values())).options.model)
    found: dict[str, list[Run]] = {name: [] for name in setups}
    async with AsyncExitStack() as stacks:
        engines: dict[str, Running] = {}
        for name, setup in setups.items():
            options = setup.options
            if timelines is not None and name != "monolithic":
                (timelines / name).mkdir()
                options = replace(options, timelines=timelines / name)
            engines[name] = await stacks.enter_async_context(running(options))
            warm_up = replace(load.shortened(WARM_UP_TOKENS), lengths=load.shortened(WARM_UP_TOKENS).lengths * 2)
            await engines[name].work(run(engines[name].client, warm_up.asks(-1, vocabulary)))
        for repeat in range(repeats):
            for name, engine in engines.items():
                asks = replace(load, lengths=load.lengths * setups[name].requests).asks(repeat, vocabulary)
                found[name].append(await engine.work(run(engine.client, asks)))
                print(f"{name}: {found[name][-1].total_s:.2f} s", file=sys.stderr)
    return found


def _draw(plot: Path, folder: Path, found: dict[str, list[Run]]) -> None:
    """The end of each engine's last window, as long as some lane-steps of the slowest one."""
    windows = {name: runs[-1].window for name, runs in found.items() if (folder / name).is_dir()}
    there = {name: window for name, window in windows.items() if window is not None}
    length = PLOTTED_STEPS * max((window.of_step("total_s") for window in there.values()), default=0.0)
    drawn = [line for name, each in there.items() for line in lines(name, folder / name, each.end - length, each.end)]
    write_plot(plot, drawn)
