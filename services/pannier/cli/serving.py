"""Requests made of a server one by one, as clients would, and what each of them saw."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from pannier.cli.load import Ask
from pannier.client import AsyncClient, ClientError

if TYPE_CHECKING:
    import httpx

TIMEOUT_S = 6 * 3600.0
SMALL_VOCABULARY = 1000
"""Tokens that any server's model has, where it doesn't say how many."""


class Target(Protocol):
    """A server that generates."""

    async def vocab_size(self) -> int:
        """How many tokens its model knows, at least."""

    def stream(self, ask: Ask) -> AsyncIterator[int]:
        """How many tokens have come, each time that some do. Raises `ServerError`."""


class ServerError(Exception):
    """Raised when a request gets an error instead of its tokens."""


class ZmqTarget:
    """A gateway, asked over its own protocol."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def vocab_size(self) -> int:
        """As its status says."""
        size = (await self._client.status())["vocab_size"]
        return SMALL_VOCABULARY if size is None else int(size)

    async def stream(self, ask: Ask) -> AsyncIterator[int]:
        """Greedy, end tokens ignored."""
        try:
            async with self._client.stream(
                ask.prompt, max_tokens=ask.output, temperature=0.0, ignore_eos=True
            ) as chunks:
                async for chunk in chunks:
                    yield len(chunk.tokens)
        except ClientError as error:
            raise ServerError(str(error)) from error


class HttpTarget:
    """Any server that speaks OpenAI's API."""

    def __init__(self, client: "httpx.AsyncClient", model: str) -> None:
        self._client = client
        self._model = model

    async def vocab_size(self) -> int:
        """As the status says, if there is one."""
        answer = await self._client.get("/status")
        try:
            return int(answer.json()["vocab_size"])
        except (ValueError, KeyError, TypeError):
            return SMALL_VOCABULARY

    async def stream(self, ask: Ask) -> AsyncIterator[int]:
        """Greedy, end tokens ignored. A server that doesn't count tokens is taken to send one in each chunk."""
        import httpx

        body = {
            "model": self._model, "prompt": ask.prompt, "max_tokens": ask.output, "temperature": 0, "stream": True,
            "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        try:
            async with self._client.stream("POST", "/v1/completions", json=body) as answer:
                if answer.status_code != httpx.codes.OK:
                    raise ServerError(f"{answer.status_code}: {(await answer.aread()).decode(errors='replace')[:300]}")
                async for line in answer.aiter_lines():
                    if line.startswith("data: ") and not line.startswith("data: [DONE]"):
                        yield _num_tokens(json.loads(line[6:]))
        except httpx.HTTPError as error:
            raise ServerError(f"{type(error).__name__}: {error}") from error


def _num_tokens(chunk: dict[str, Any]) -> int:
    if "error" in chunk:
        raise ServerError(str(chunk["error"].get("message", chunk["error"])))
    return sum(len(choice["token_ids"]) if "token_ids" in choice else 1 for choice in chunk.get("choices", ()))


@dataclass
class Seen:
    """One request, in seconds."""

    prompt_tokens: int
    wanted_tokens: int
    start_s: float
    """When it was made, after the first of all was due."""
    tokens: int = 0
    first_token_s: float = 0.0
    """After it was made; of one that was due before it could be made, after it was due."""
    between_s: list[float] = field(default_factory=list)
    latency_s: float = 0.0
    error: str | None = None

    @property
    def per_token_s(self) -> float:
        """Time per output token behind the first."""
        return (self.latency_s - self.first_token_s) / max(1, self.tokens - 1)


async def serve_all(
    target: Target, asks: Sequence[Ask], arrivals: Sequence[float], max_concurrency: int | None
) -> tuple[list[Seen], float]:
    """Make every request when it is due, or as soon as fewer than `max_concurrency` run; what they saw, and how long
    all took."""
    room = asyncio.Semaphore(max_concurrency or len(asks))
    started = time.perf_counter()

    async def make(ask: Ask, due: float) -> Seen:
        await asyncio.sleep(max(0.0, started + due - time.perf_counter()))
        async with room:
            return await _make(target, ask, started)

    seen = await asyncio.gather(*[make(ask, due) for ask, due in zip(asks, arrivals, strict=True)])
    return seen, time.perf_counter() - started


async def _make(target: Target, ask: Ask, started: float) -> Seen:
    began = last = time.perf_counter()
    seen = Seen(len(ask.prompt), ask.output, began - started)
    try:
        async with aclosing(target.stream(ask)) as counts:  # type: ignore[type-var]  # they are generators
            async for count in counts:
                if not count:
                    continue
                now = time.perf_counter()
                if seen.tokens:
                    seen.between_s.append(now - last)
                else:
                    seen.first_token_s = now - began
                seen.tokens += count
                seen.latency_s, last = now - began, now
    except ServerError as error:
        seen.error = str(error)
    return seen
