"""`pannier bench offline --kv-budget`: offloaded beside devices whose memory leaves little for K and V.

What will be found is predicted first, from short runs with other batches and contexts. Prompts are computed before
anything is timed, once: as in the Lamina paper, where another pool does that.
"""

import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from pannier.cli.budget_report import OFFLOADED, Found, report_of
from pannier.cli.budget_run import Budgeted, calibrate
from pannier.cli.engines import running
from pannier.cli.load import Lengths, Load, vocab_size
from pannier.cli.report import Report
from pannier.planner.measured import MeasuredClock, Prediction, predict

if TYPE_CHECKING:
    from pannier.cli.stack import ServeOptions


def budgets(options: "ServeOptions", sizes: str) -> dict[str, "ServeOptions"]:
    """A monolithic stack for each of some sizes, as in 16MB,64MB."""
    return {f"monolithic {size}": replace(options, monolithic=True, attention_memory=size) for size in sizes.split(",")}


async def compare(offloaded: "ServeOptions", alone: Mapping[str, "ServeOptions"], load: Load, repeats: int) -> Report:
    """Start all, calibrate, predict, fill, then time by turns."""
    stacks, vocabulary = {**alone, OFFLOADED: offloaded}, vocab_size(offloaded.model)
    async with AsyncExitStack() as exits:
        engines = {
            name: await Budgeted.of(await exits.enter_async_context(running(options)), vocabulary)
            for name, options in stacks.items()
        }
        roomiest = max(alone, key=lambda name: engines[name].blocks)
        clocks = await calibrate({name: engines[name] for name in (roomiest, OFFLOADED)}, len(load.lengths))
        found = {}
        for name, engine in engines.items():
            found[name] = Found(_predict(engine, clocks[OFFLOADED if name == OFFLOADED else roomiest], load.lengths))
            expected = found[name].predicted
            _say(f"{name}: {expected.batch} at once are predicted, {expected.tokens_per_s:.1f} tokens/s")
        await _measure(engines, found, load, repeats)
    return report_of(f"{offloaded.model} {load.name} {offloaded.dtype}", found, clocks)


async def _measure(engines: Mapping[str, Budgeted], found: Mapping[str, Found], load: Load, repeats: int) -> None:
    for name, engine in engines.items():
        found[name].batch = await engine.fill(load, found[name].predicted.batch)
        _say(f"{name}: {found[name].batch} at once")
    for _ in range(repeats):
        for name, engine in engines.items():
            window = await engine.time(load, found[name].batch)
            found[name].windows.append(window)
            _say(f"{name}: {window.tokens / window.wall_s:.1f} tokens/s")


def _predict(engine: Budgeted, clock: MeasuredClock, lengths: tuple[Lengths, ...]) -> Prediction:
    return predict(clock, engine.setup(len(lengths), lengths[0]), len(lengths), *lengths[0])


def _say(what: str) -> None:
    print(what, file=sys.stderr)
