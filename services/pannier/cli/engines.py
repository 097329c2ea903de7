"""Engines that a measuring command runs side by side: our stack, and transformers in a process of its own."""

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self, TypeVar

from pannier.cli.load import Ask
from pannier.runtime.errors import PannierError
from pannier.runtime.tasks import first_end

if TYPE_CHECKING:
    from pannier.cli.stack import ServeOptions
    from pannier.cli.supervisor import Children
    from pannier.client import AsyncClient

PEERS = ("transformers", "transformers-continuous")
MAX_LINE_BYTES = 64 << 20
T = TypeVar("T")
Arrivals = list[list[float]]
"""For each request the seconds since the start at which its tokens came."""


@dataclass(frozen=True)
class Engine:
    """Takes requests, all at once. How it is set may be decided while it warms up."""

    run: Callable[[list[Ask]], Awaitable[Arrivals]]
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Timing:
    """Seconds of one repeat; `decode_s` counts from when every request had its first token, `decode_tokens` since."""

    total_s: float
    decode_s: float
    prompt_tokens: int
    output_tokens: int
    decode_tokens: int

    @classmethod
    def of(cls, asks: list[Ask], arrivals: Arrivals) -> Self:
        """From when the tokens came. Raises `PannierError` when they are not as many as were asked for."""
        for number, (ask, times) in enumerate(zip(asks, arrivals, strict=True)):
            if len(times) != ask.output:
                raise PannierError(f"request {number} got {len(times)} tokens; {ask.output} were asked for")
        end, all_first = max(times[-1] for times in arrivals), max(times[0] for times in arrivals)
        return cls(
            total_s=end,
            decode_s=end - all_first,
            prompt_tokens=sum(len(ask.prompt) for ask in asks),
            output_tokens=sum(ask.output for ask in asks),
            decode_tokens=sum(each > all_first for times in arrivals for each in times),
        )


@asynccontextmanager
async def stack(options: "ServeOptions", **workers_environment: str) -> AsyncIterator[Engine]:
    """Our stack, ready, as an engine."""
    async with running(options, **workers_environment) as stack:

        async def run(asks: list[Ask]) -> Arrivals:
            return await stack.work(_ask_stack(stack.client, asks))

        yield Engine(run, dict(workers_environment))


@dataclass(frozen=True)
class Running:
    """Our stack, ready."""

    client: "AsyncClient"
    children: "Children"

    async def work(self, work: Coroutine[Any, Any, T]) -> T:
        """Work with it. Raises `ChildEnded` as soon as a process of it ends."""
        found: list[T] = []

        async def keep() -> None:
            found.append(await work)

        await first_end(keep(), self.children.first_end())
        return found[0]


@asynccontextmanager
async def running(options: "ServeOptions", **workers_environment: str) -> AsyncIterator[Running]:
    """Our stack, from when it is ready."""
    from pannier.cli.display import Display
    from pannier.cli.run_folder import run_folder
    from pannier.cli.serve import commands, is_ready
    from pannier.cli.stack import plan
    from pannier.cli.supervisor import Children
    from pannier.client import AsyncClient

    with run_folder() as folder, Display() as display:
        planned = plan(options, folder)
        async with (
            Children(commands(planned, folder, workers_environment), display.line, drain_s=1.0) as children,
            AsyncClient(planned.gateway.client_endpoint) as client,
        ):

            async def wait() -> None:
                while not await is_ready(client, children.pid("gateway")):  # noqa: ASYNC110  # another process's event
                    await asyncio.sleep(0.1)

            await first_end(wait(), children.first_end())
            display.ready()
            yield Running(client, children)


async def _ask_stack(client: "AsyncClient", asks: list[Ask]) -> Arrivals:
    started = time.perf_counter()

    async def arrivals(ask: Ask) -> list[float]:
        times = []
        async with client.stream(ask.prompt, max_tokens=ask.output, temperature=0.0, ignore_eos=True) as chunks:
            async for chunk in chunks:
                times += [time.perf_counter() - started] * len(chunk.tokens)
        return times

    return await asyncio.gather(*[arrivals(ask) for ask in asks])


@asynccontextmanager
async def transformers(name: str, model: str, dtype: str) -> AsyncIterator[Engine]:
    """One of `PEERS` in a process of its own, with every core, as an engine. It ends when its stdin does."""
    threads = str(len(os.sched_getaffinity(0)))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pannier.cli.transformers_peer", name, model, dtype, threads),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=MAX_LINE_BYTES,
        env={**os.environ, "OMP_NUM_THREADS": threads},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    to_peer, from_peer = process.stdin, process.stdout
    settings: dict[str, Any] = {}

    async def run(asks: list[Ask]) -> Arrivals:
        to_peer.write(json.dumps(asks).encode() + b"\n")
        await to_peer.drain()
        answer = await _answer(from_peer)
        settings.update(answer["settings"])
        arrivals: Arrivals = answer["arrivals"]
        return arrivals

    try:
        await _answer(from_peer)
        yield Engine(run, settings)
    finally:
        to_peer.close()
        process.kill()
        await process.wait()


async def _answer(stream: asyncio.StreamReader) -> dict[str, Any]:
    line = await stream.readline()
    if not line:
        raise PannierError("transformers ended by itself; what it wrote last says why")
    answer: dict[str, Any] = json.loads(line)
    return answer
