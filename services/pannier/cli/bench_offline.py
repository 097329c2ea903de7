"""`pannier bench offline`: a batch of equal requests through our stack, and through transformers, in one run.

Every engine is started first; then the repeats alternate between them, while those that aren't measured sleep.
"""

import asyncio
import json
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pannier.cli.report import Report

if TYPE_CHECKING:
    from pannier.cli.stack import ServeOptions
    from pannier.client import AsyncClient

WARM_UP_TOKENS = 8
FIRST_TOKEN, LAST_TOKEN = 10, 4000
"""Prompts are drawn from these token ids (or fewer if the vocabulary is smaller), clear of special tokens."""


@dataclass(frozen=True)
class Load:
    """What every engine is given: equal requests, greedy, all at once, end tokens ignored."""

    requests: int
    input: int
    output: int

    def prompts(self, repeat: int, vocab_size: int) -> list[list[int]]:
        """Random prompts, others for every repeat."""
        draw = random.Random(repeat)
        last = min(LAST_TOKEN, vocab_size - 1)
        return [[draw.randint(FIRST_TOKEN, last) for _ in range(self.input)] for _ in range(self.requests)]


@dataclass(frozen=True)
class Timing:
    """Seconds of one repeat; `decode_s` counts from when every request had its first token, `decode_tokens` since."""

    total_s: float
    decode_s: float
    decode_tokens: int


Engine = Callable[[list[list[int]], int], Awaitable[Timing]]


def offline(
    model: Annotated[str, typer.Option(help="A folder, 'embedded', or random:SHAPE.")],
    requests: Annotated[int, typer.Option(min=1)] = 32,
    input: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 128,
    output: Annotated[int, typer.Option(min=2, help="Tokens of each completion.")] = 128,
    against: Annotated[str | None, typer.Option(metavar="transformers", help="Another engine to time beside.")] = None,
    attention: Annotated[str, typer.Option(help="Attention workers of the offloaded stack, as in `serve`.")] = "1",
    lanes: Annotated[int | None, typer.Option(help="As in `serve`.")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float32 or float16, for every engine.")] = "bfloat16",
    max_batch_tokens: Annotated[int | None, typer.Option(help="As in `serve`.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Alternating repeats of each engine.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")] = False,
) -> None:
    """Time a batch of requests: offloaded, monolithic, and another engine if asked, on the same weights."""
    if against not in (None, "transformers"):
        raise typer.BadParameter(f"{against!r} is not known; it must be transformers", param_hint="--against")
    from pannier.cli.stack import ServeOptions

    options = ServeOptions(
        model=model, dtype=dtype, lanes=lanes, max_batch_tokens=max_batch_tokens, max_sequences=max(64, requests)
    )
    load = Load(requests, input, output)
    report = asyncio.run(_measure(options, attention, against, load, repeats))
    base = against or "monolithic"
    report.print(base)
    if as_json:
        print(report.to_json(base))


async def _measure(options: "ServeOptions", attention: str, against: str | None, load: Load, repeats: int) -> Report:
    report = Report("bench offline")
    case = f"{options.model} {load.requests}x{load.input}+{load.output} {options.dtype}"
    async with AsyncExitStack() as running:
        engines: dict[str, Engine] = {
            "offloaded": await running.enter_async_context(_stack(replace(options, attention=attention))),
            "monolithic": await running.enter_async_context(_stack(replace(options, monolithic=True))),
        }
        if against is not None:
            engines[against] = await running.enter_async_context(_transformers(options.model, options.dtype))
        found: dict[str, list[Timing]] = {name: [] for name in engines}
        for engine in engines.values():
            await engine(load.prompts(-1, LAST_TOKEN), min(load.output, WARM_UP_TOKENS))
        for repeat in range(repeats):
            for name, engine in engines.items():
                found[name].append(await engine(load.prompts(repeat, LAST_TOKEN), load.output))
                print(f"{name}: {found[name][-1].total_s:.2f} s", file=sys.stderr)
    for name, timings in found.items():
        tokens = load.requests * load.output
        report.add(case, name, "output_tokens_per_s", "tokens/s", [tokens / each.total_s for each in timings])
        decode = [each.decode_tokens / each.decode_s for each in timings]
        report.add(case, name, "decode_tokens_per_s", "tokens/s", decode)
    return report


@asynccontextmanager
async def _stack(options: "ServeOptions") -> AsyncIterator[Engine]:
    """Our stack, ready, as an engine."""
    from pannier.cli.display import Display
    from pannier.cli.run_folder import run_folder
    from pannier.cli.serve import commands, is_ready
    from pannier.cli.stack import plan
    from pannier.cli.supervisor import Children
    from pannier.client import AsyncClient
    from pannier.runtime.tasks import first_end

    with run_folder() as folder, Display() as display:
        stack = plan(options, folder)
        async with (
            Children(commands(stack, folder), display.line, drain_s=1.0) as children,
            AsyncClient(stack.gateway.client_endpoint) as client,
        ):

            async def wait() -> None:
                while not await is_ready(client, children.pid("gateway")):  # noqa: ASYNC110  # another process's event
                    await asyncio.sleep(0.1)

            await first_end(wait(), children.first_end())
            display.ready()

            async def engine(prompts: list[list[int]], output: int) -> Timing:
                timings: list[Timing] = []

                async def work() -> None:
                    timings.append(await _time_stack(client, prompts, output))

                await first_end(work(), children.first_end())
                return timings[0]

            yield engine


async def _time_stack(client: "AsyncClient", prompts: list[list[int]], output: int) -> Timing:
    started = time.perf_counter()

    async def arrivals(prompt: list[int]) -> list[float]:
        times = []
        async with client.stream(prompt, max_tokens=output, temperature=0.0, ignore_eos=True) as chunks:
            async for chunk in chunks:
                times += [time.perf_counter()] * len(chunk.tokens)
        return times

    times = await asyncio.gather(*[arrivals(prompt) for prompt in prompts])
    end, all_first = max(each[-1] for each in times), max(each[0] for each in times)
    return Timing(end - started, end - all_first, sum(each > all_first for some in times for each in some))


@asynccontextmanager
async def _transformers(model: str, dtype: str | None) -> AsyncIterator[Engine]:
    """transformers in a process of its own, with every core, as an engine. It ends when its stdin does."""
    assert dtype is not None
    threads = str(len(os.sched_getaffinity(0)))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pannier.cli.transformers_peer", model, dtype, threads),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": threads},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    to_peer, from_peer = process.stdin, process.stdout
    try:
        await _answer(from_peer)

        async def engine(prompts: list[list[int]], output: int) -> Timing:
            to_peer.write(json.dumps({"prompts": prompts, "output": output}).encode() + b"\n")
            await to_peer.drain()
            answer = await _answer(from_peer)
            return Timing(answer["total_s"], answer["decode_s"], len(prompts) * (output - 1))

        yield engine
    finally:
        to_peer.close()
        process.kill()
        await process.wait()


async def _answer(stream: asyncio.StreamReader) -> dict[str, Any]:
    from pannier.runtime.errors import PannierError

    line = await stream.readline()
    if not line:
        raise PannierError("transformers ended by itself; what it wrote last says why")
    answer: dict[str, Any] = json.loads(line)
    return answer
