#!/usr/bin/env python
"""Predicted against measured step times: the cost model held against the engine, on this machine.

    scripts/bench plan --profile FILE      # measured first if there is no such file; about 20 minutes on two cores

The profile is measured once, beforehand: slices, attention calls, links and the engine's own costs, each by itself, and
never fitted to what is measured here. Then each configuration runs: requests that all decode, whose past is random
numbers that nobody computed (emulate_past). Its step time, the median of the repeats, is set beside the prediction, of
which what reads memory is scaled by how fast that went before and after, of what the profile says: machines are shared.

The goal is a median error of at most 10 %, and 25 % at the 90th percentile. Nothing else should run meanwhile.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from pannier.cli.bench_device import measure
from pannier.cli.engines import running
from pannier.cli.kernel_ceilings import Ceilings
from pannier.cli.kernel_shapes import STREAM
from pannier.cli.load import Load, vocab_size
from pannier.cli.overlap_run import LAST_TOKENS, WARM_TOKENS, run
from pannier.cli.plan_inputs import model_sizes
from pannier.cli.stack import ServeOptions
from pannier.planner.predict import Case, Prediction, predict, scaled
from pannier.planner.profile import Profile, read_profile, write_profile
from pannier.planner.sensitivity import GIGABIT
from pannier.runtime.errors import PannierError
from pannier.runtime.host import host_cores, host_memory

SMALL, LARGE = "random:llama-135m", "random:llama-1b"
DTYPE, BLOCK = "bfloat16", 64
OUTPUT = 40
"""Tokens of each request; those between the first and the last few are timed."""
LONGEST = 8192 - OUTPUT - 1
MOST_BYTES = 8 << 30
"""Of K and V: configurations with more are left out."""
READ_S = 0.3


@dataclass(frozen=True)
class Setting:
    """One configuration; `lanes` 0 is monolithic."""

    model: str
    rows: int
    context: int
    lanes: int = 0
    delay_ms: float | None = None
    gigabits: float | None = None

    @property
    def name(self) -> str:
        kind = "monolithic" if not self.lanes else f"offloaded, {self.lanes} lane{'s' * (self.lanes > 1)}"
        link = f", {self.delay_ms or 0:g} ms each way" * (self.delay_ms is not None)
        link += f", {self.gigabits or 0:g} Gbit/s" * (self.gigabits is not None)
        return f"{self.model.removeprefix('random:')} {kind}{link}, {self.rows} rows of {self.context}"

    @property
    def requests(self) -> int:
        return self.rows * max(1, self.lanes)

    @property
    def kv_bytes(self) -> float:
        blocks = -(-(self.context + OUTPUT) // BLOCK) + 1
        return self.requests * blocks * BLOCK * model_sizes(self.model).kv_bytes

    def case(self) -> Case:
        middle = (WARM_TOKENS + OUTPUT - LAST_TOKENS) / 2
        return Case(
            model=model_sizes(self.model),
            dtype=DTYPE,
            rows=self.rows,
            context=self.context + middle,
            lanes=max(1, self.lanes),
            is_monolithic=not self.lanes,
            delay_s=(self.delay_ms or 0.0) / 1e3,
            bandwidth=None if self.gigabits is None else self.gigabits * GIGABIT,
        )

    def options(self) -> ServeOptions:
        most = max(64, self.requests)
        return ServeOptions(
            model=self.model,
            dtype=DTYPE,
            monolithic=not self.lanes,
            lanes=self.lanes or 1,
            attention_memory=str(int(1.1 * self.kv_bytes) + (16 << 20)),
            max_sequences=most,
            max_batch_tokens=max(512, most),
            emulate_past=True,
            emulate_delay=self.delay_ms,
            emulate_bandwidth=self.gigabits,
        )


def settings() -> Iterator[Setting]:
    """Rows from 1 to 64, contexts from 128 to 8,192; monolithic and offloaded, one lane and two, links made slower."""
    for rows, context in ((1, 128), (1, LONGEST), (4, 1024), (16, 1024), (16, LONGEST), (64, 128), (64, 1024)):
        yield Setting(SMALL, rows, context)
    for rows, context in ((1, 128), (4, 1024), (16, 1024), (16, 4096), (64, 1024)):
        yield Setting(SMALL, rows, context, lanes=1)
    for rows, context in ((1, 1024), (4, 1024), (16, 1024), (16, 4096)):
        yield Setting(SMALL, rows, context, lanes=2)
    yield Setting(SMALL, 16, 1024, lanes=1, delay_ms=0.5)
    yield Setting(SMALL, 16, 1024, lanes=2, delay_ms=1.0)
    yield Setting(SMALL, 16, 1024, lanes=2, gigabits=1.0)
    for rows, context in ((1, 128), (4, 4096), (16, 1024), (64, 512)):
        yield Setting(LARGE, rows, context)
    for rows, context in ((4, 1024), (16, 2048)):
        yield Setting(LARGE, rows, context, lanes=1)
    yield Setting(LARGE, 16, 1024, lanes=2)
    yield Setting(LARGE, 16, 1024, lanes=2, delay_ms=1.0)


@dataclass(frozen=True)
class Found:
    """One configuration's step time, and what it was predicted to be on the machine as it then was."""

    setting: Setting
    predicted: Prediction
    measured_s: float
    repeats: tuple[float, ...]
    slower: float
    """How many times as long reading took as when the profile was measured."""

    @property
    def error(self) -> float:
        return self.predicted.seconds / self.measured_s - 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", type=Path, required=True, help="of this machine; measured first if it isn't there")
    parser.add_argument("--repeats", type=int, default=3, help="of each configuration; %(default)s")
    parser.add_argument("--only", type=int, help="only so many configurations, spread over all")
    parser.add_argument(
        "--seconds", type=float, default=0.5, help="how long a profile measures each thing; %(default)s"
    )
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    options = parser.parse_args()
    if not options.profile.exists():
        write_profile(options.profile, measure("cpu", [SMALL, LARGE], DTYPE, options.seconds))
    profile = read_profile(options.profile)
    wanted = [each for each in settings() if each.kv_bytes <= min(MOST_BYTES, host_memory().free / 3)]
    if options.only:
        wanted = wanted[:: -(-len(wanted) // options.only)]
    found = []
    for number, setting in enumerate(wanted, 1):
        print(f"{number} of {len(wanted)}: {setting.name}", file=sys.stderr)
        try:
            found.append(asyncio.run(compare(profile, setting, options.repeats)))
        except PannierError as error:
            print(f"left out: {error}", file=sys.stderr)
    report(found)
    if options.json:
        print(json.dumps({"command": "bench plan", "rows": [row(each) for each in found]}))
    return 0


async def compare(profile: Profile, setting: Setting, repeats: int) -> Found:
    """Run a configuration between two looks at how fast memory is read."""
    expected = predict(profile, setting.case(), host_cores())  # or that it can't be, before anything is started
    before, times = read_rate(), []
    async with running(setting.options()) as engine:
        load, vocabulary = Load.equal(setting.requests, setting.context, OUTPUT), vocab_size(setting.model)
        await engine.work(run(engine.client, load.shortened(WARM_TOKENS + LAST_TOKENS + 4).asks(-1, vocabulary)))
        for repeat in range(repeats):
            window = (await engine.work(run(engine.client, load.asks(repeat, vocabulary)))).window
            if window is not None:
                times.append(window.lane_step_s)
    if not times:
        raise PannierError("at no moment did all requests decode")
    slower = profile.read_bytes_per_s / ((before + read_rate()) / 2)
    return Found(setting, scaled(expected, slower), median(times), tuple(times), slower)


def read_rate() -> float:
    return 1e9 * Ceilings().sample(STREAM, READ_S)


def report(found: list[Found]) -> None:
    table = Table("configuration", "predicted ms", "measured ms", "error", "held by", "reading took", box=None)
    for each in found:
        table.add_row(
            each.setting.name,
            f"{each.predicted.seconds * 1e3:.2f}",
            f"{each.measured_s * 1e3:.2f}",
            f"{each.error:+.1%}",
            each.predicted.held_by,
            f"{each.slower:.2f}x",
        )
    Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 160).print(table)
    errors = sorted(abs(each.error) for each in found)
    if errors:
        p90 = errors[min(len(errors) - 1, len(errors) * 9 // 10)]
        print(f"{len(errors)} configurations: median error {median(errors):.1%}, 90th percentile {p90:.1%}")


def row(found: Found) -> dict[str, object]:
    return {
        "case": found.setting.name,
        "engine": "offloaded" if found.setting.lanes else "monolithic",
        "metric": "lane_step",
        "unit": "s",
        "value": found.measured_s,
        "repeats": found.repeats,
        "predicted": found.predicted.seconds,
        "parts": found.predicted.parts._asdict(),
        "error": found.error,
        "reading_took": found.slower,
    }


if __name__ == "__main__":
    sys.exit(main())
