"""One repeat on one stack: how fast tokens came, and where the time of its lane-steps went."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pannier.cli.load import Ask
from pannier.planner.overlap import Parts
from pannier.runtime.errors import PannierError

if TYPE_CHECKING:
    from pannier.client import AsyncClient

WARM_TOKENS = 4
"""Tokens of every request before measuring: by then all of them decode."""
LAST_TOKENS = 4
"""Measuring ends so many tokens before the slowest request does: lanes that are ahead have rows until then.

It begins and ends with the slowest, so that as much is under way, and not counted, before it as behind it.
"""


@dataclass(frozen=True)
class Window:
    """While every request decoded. Moments are of `time.perf_counter`; `seconds` are sums over all lane-steps."""

    start: float
    end: float
    requests: int
    tokens: int
    steps: int
    seconds: dict[str, float]
    compute_s: dict[str, float]
    """Of each compute worker."""

    @property
    def wall_s(self) -> float:
        """How long it was."""
        return self.end - self.start

    @property
    def parts(self) -> Parts:
        """Of a lane-step, on average."""
        return Parts(*(self.of_step(name) for name in ("compute_s", "attention_s", "transfer_s")))

    @property
    def lane_step_s(self) -> float:
        """From one lane-step of a replica to the next."""
        return self.wall_s * len(self.compute_s) / self.steps

    @property
    def compute_busy(self) -> float:
        """Share of the time in which compute devices worked: of the least busy one."""
        return min(self.compute_s.values()) / self.wall_s

    @property
    def attention_busy(self) -> float:
        """Share of the time in which the attention pool worked, by the worker that answers last."""
        return self.seconds["attention_s"] / self.wall_s

    def of_step(self, name: str) -> float:
        """Seconds of one part of a lane-step, on average."""
        return self.seconds[name] / self.steps


@dataclass(frozen=True)
class Run:
    """All requests from first to last; `window` is None if there was no moment at which all of them decoded."""

    tokens: int
    total_s: float
    window: Window | None


async def run(client: "AsyncClient", asks: list[Ask]) -> Run:
    """Make all requests at once. Raises `PannierError` if one doesn't get what it asked for."""
    counts = [0] * len(asks)
    progress = asyncio.Condition()

    async def stream(number: int, ask: Ask) -> None:
        async with client.stream(ask.prompt, max_tokens=ask.output, temperature=0.0, ignore_eos=True) as chunks:
            async for chunk in chunks:
                counts[number] += len(chunk.tokens)
                async with progress:
                    progress.notify_all()

    async def watch() -> Window | None:
        async with progress:
            await progress.wait_for(lambda: min(counts) >= WARM_TOKENS)
        before = await _look(client, counts)
        async with progress:
            await progress.wait_for(lambda: min(counts) >= asks[0].output - LAST_TOKENS)
        after = await _look(client, counts)
        return _window(before, after, len(asks))

    started = time.perf_counter()
    watching = asyncio.create_task(watch())
    await asyncio.gather(*(stream(number, ask) for number, ask in enumerate(asks)))
    total_s = time.perf_counter() - started
    if counts != [ask.output for ask in asks]:
        raise PannierError(f"requests got {counts} tokens; {[ask.output for ask in asks]} were asked for")
    return Run(sum(counts), total_s, await watching)


@dataclass(frozen=True)
class _Look:
    moment: float
    tokens: int
    lanes: list[dict[str, Any]]


async def _look(client: "AsyncClient", counts: Iterable[int]) -> _Look:
    status = await client.status()
    return _Look(time.perf_counter(), sum(counts), status["lanes"])


def _window(before: _Look, after: _Look, requests: int) -> Window | None:
    steps, seconds, compute_s = 0, defaultdict[str, float](float), defaultdict[str, float](float)
    for old, new in zip(before.lanes, after.lanes, strict=True):
        steps += new["steps"] - old["steps"]
        for name in new["seconds"]:
            seconds[name] += new["seconds"][name] - old["seconds"].get(name, 0.0)
        compute_s[new["worker"]] += new["seconds"].get("compute_s", 0.0) - old["seconds"].get("compute_s", 0.0)
    if not steps or after.tokens <= before.tokens:
        return None
    return Window(
        before.moment, after.moment, requests, after.tokens - before.tokens, steps, dict(seconds), dict(compute_s)
    )
