"""A stack that is filled with as many requests as it holds at once: how it is calibrated, filled and timed."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pannier.cli.engines import Running
from pannier.cli.load import Ask, Lengths, Load
from pannier.cli.overlap_run import LAST_TOKENS, WARM_TOKENS, Window, run
from pannier.planner.measured import MeasuredClock, Sample
from pannier.planner.overlap import Parts
from pannier.planner.setup import Setup
from pannier.runtime.errors import ConfigError, PannierError

if TYPE_CHECKING:
    from pannier.client import AsyncClient

CALIBRATION_TOKENS = 24
"""Of each completion."""
CALIBRATION_TURNS = 3
SHORT, LONG = 64, 1024
"""Tokens of the contexts with which is calibrated: many short ones for what rows cost, some long ones for reading."""
LONG_ROWS = 8
POLL_S = 0.05
OTHERS = 10**6
"""Prompts for calibration are none of those that are timed: what is cached of these would be found."""


@dataclass(frozen=True)
class Budgeted:
    """A stack that is ready, with its lanes and what its blocks hold."""

    running: Running
    lanes: int
    blocks: int
    block_size: int
    vocabulary: int

    @classmethod
    async def of(cls, running: Running, vocabulary: int) -> "Budgeted":
        """As its status says. Raises `ConfigError` if its attention workers form several groups."""
        status = await running.client.status()
        if len(status["groups"]) != 1:
            raise ConfigError(f"the attention workers form {len(status['groups'])} groups; a comparison is of one")
        (group,) = status["groups"].values()
        (block_size,) = {p["block_size"] for p in status["processes"] if "block_size" in p}
        return cls(running, len(status["lanes"]), group["total"], block_size, vocabulary)

    def setup(self, requests: int, lengths: Lengths) -> Setup:
        """The same for the planner, which is given all prompts at once: they cost nothing there."""
        return Setup(
            groups=(self.blocks,),
            lanes=self.lanes,
            block_size=self.block_size,
            max_batch_tokens=requests * lengths.prompt,
            max_sequences=requests,
            prefix_cache=False,
        )

    async def sample(self, batch: int, context: int) -> Sample:
        """The lane-steps of a short run, of as long contexts and as many as there are blocks for, one kept back."""
        context = max(SHORT, min(context, (self.blocks - 1) * self.block_size))
        batch = max(1, min(batch, (self.blocks - 1) // -(-context // self.block_size)))
        load = Load.equal(batch, context - CALIBRATION_TOKENS, CALIBRATION_TOKENS)
        window = await self._timed(load.asks(OTHERS + batch, self.vocabulary))
        lanes = min(self.lanes, batch)
        compute_s, attention_s, _ = window.parts
        rest_s = max(0.0, lanes * window.lane_step_s - compute_s - attention_s)
        rows = batch / lanes
        return Sample(rows, rows * (context - CALIBRATION_TOKENS / 2), Parts(compute_s, attention_s, rest_s))

    async def fill(self, load: Load, expected: int) -> int:
        """How many of the load's requests run at once to their end; their prompts are cached when it returns.

        It is tried with one more than expected, which has to wait. Of those that begin at once some may be preempted
        later, when there are no blocks for the tokens of all.
        """
        asks = load.asks(0, self.vocabulary)
        await self.running.work(_first_tokens(self.running.client, asks[:expected]))
        batch = await self.running.work(_at_once(self.running.client, asks[: expected + 1]))
        if batch > expected:
            return await self.fill(load, batch)
        while await self._preempts(asks[:batch]):
            batch -= 1
        return batch

    async def _preempts(self, asks: list[Ask]) -> bool:
        """Whether one of these is preempted, once the prompts are back that others may have evicted."""
        counts = []
        for _ in range(2):
            await self.running.work(run(self.running.client, asks))
            counts.append((await self.running.client.status())["preemptions"])
        return len(set(counts)) > 1

    async def time(self, load: Load, batch: int) -> Window:
        """One repeat with so many requests, the same ones each time."""
        return await self._timed(load.asks(0, self.vocabulary)[:batch])

    async def _timed(self, asks: list[Ask]) -> Window:
        window = (await self.running.work(run(self.running.client, asks))).window
        if window is None:
            least = WARM_TOKENS + LAST_TOKENS
            raise PannierError(f"at no moment all {len(asks)} requests decoded: give them more than {least} tokens")
        return window


async def calibrate(engines: Mapping[str, Budgeted], most: int) -> dict[str, MeasuredClock]:
    """From short runs of one request up to `most` at once, by turns: so all engines meet the same other load.

    Of each kind of run counts the median.
    """
    batches = sorted({*(batch for batch in (1, 4, 16, 64) if batch < most), most})
    short = [await _samples(engines, batch, SHORT) for batch in batches]
    long = await _samples(engines, min(LONG_ROWS, most), LONG)
    return {
        # Where few fit, several batches were the same.
        name: MeasuredClock(tuple({each[name].rows: each[name] for each in short}.values()), long[name])
        for name in engines
    }


async def _samples(engines: Mapping[str, Budgeted], batch: int, context: int) -> dict[str, Sample]:
    """The median of some turns, of each engine."""
    turns: dict[str, list[Sample]] = {name: [] for name in engines}
    for _ in range(CALIBRATION_TURNS):
        for name, turn in turns.items():
            turn.append(await engines[name].sample(batch, context))
    return {name: sorted(turn, key=lambda sample: sum(sample.parts))[len(turn) // 2] for name, turn in turns.items()}


async def _first_tokens(client: "AsyncClient", asks: list[Ask]) -> None:
    await asyncio.gather(*(_stream(client, ask._replace(output=1)) for ask in asks))


async def _at_once(client: "AsyncClient", asks: list[Ask]) -> int:
    """How many run while none has ended; the prompts of all but the last are cached, so that these begin at once."""
    streams = [asyncio.create_task(_stream(client, ask)) for ask in asks]
    most = 0
    try:
        while not any(stream.done() for stream in streams):
            requests: dict[str, Any] = (await client.status())["requests"]
            most = max(most, requests["running"])
            if most == len(asks):
                break
            await asyncio.sleep(POLL_S)
    finally:
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    return most


async def _stream(client: "AsyncClient", ask: Ask) -> None:
    async with client.stream(ask.prompt, max_tokens=ask.output, temperature=0.0, ignore_eos=True) as chunks:
        async for _ in chunks:
            pass
