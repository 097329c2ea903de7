"""Requests on their way in. Turning a long text into tokens takes a while, in which steps must go on."""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from pannier.gateway.engine import Engine
from pannier.runtime.service import in_thread
from pannier.scheduler import Rejected
from pannier.wire.messages import Generate

LONG_CHARACTERS = 4096
"""A text above this is read in a thread; what is shorter takes a millisecond or two."""


@dataclass(eq=False)
class Arrival:
    """A request that waits to be read, or is being read."""

    peer: bytes
    message: Generate
    is_cancelled: bool = False


class Intake:
    """Hands requests to the engine in the order in which they came, long ones once a thread has read them.

    What comes behind a long one waits for it. Only one is read at a time: the time of the others is not worth a second
    core.
    """

    def __init__(self, engine: Callable[[], Engine], max_waiting: int) -> None:
        self._engine = engine
        self._max_waiting = max_waiting
        self._waiting: deque[Arrival] = deque()
        self._arrived = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._waiting)

    async def until_empty(self) -> None:
        """Wait until every request has been handed over."""
        await self._empty.wait()

    def take(self, peer: bytes, message: Generate) -> None:
        """A request has come; it is handed over at once if it is short and nothing waits."""
        if not self._waiting and not _is_long(message):
            self._engine().generate(peer, message)
        elif len(self._waiting) >= self._max_waiting:
            reason = f"{len(self._waiting)} requests are waiting to be read; try again later"
            self._engine().refuse(peer, message, Rejected("overloaded", None, reason))
        else:
            self._waiting.append(Arrival(peer, message))
            self._empty.clear()
            self._arrived.set()

    def cancel(self, peer: bytes, request: str) -> None:
        """Forget a request that waits here; unknown ones are fine."""
        for arrival in self._waiting:
            if (arrival.peer, arrival.message.request) == (peer, request):
                arrival.is_cancelled = True

    async def run(self) -> None:
        """Hand over what waits, for ever."""
        while True:
            await self._arrived.wait()
            while self._waiting:
                await self._read(self._waiting[0])
            self._arrived.clear()
            self._empty.set()

    async def _read(self, arrival: Arrival) -> None:
        """It stays the first of those that wait until it has been read, so that nobody overtakes it."""
        prompt: tuple[int, ...] | Rejected | None = None
        if _is_long(arrival.message) and not arrival.is_cancelled:
            prompt = await in_thread(_read, self._engine(), arrival.message)
        self._waiting.popleft()
        if arrival.is_cancelled:
            return
        if isinstance(prompt, Rejected):
            self._engine().refuse(arrival.peer, arrival.message, prompt)
        else:
            self._engine().generate(arrival.peer, arrival.message, prompt)


def _read(engine: Engine, message: Generate) -> tuple[int, ...] | Rejected:
    try:
        return engine.admission.read(message)
    except Rejected as rejected:
        return rejected


def _is_long(message: Generate) -> bool:
    if message.params.guide is not None:
        return True  # compiling it may take a while
    turns = sum(len(turn.content) for turn in message.messages or ())
    return len(message.prompt or "") + turns > LONG_CHARACTERS
