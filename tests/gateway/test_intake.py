"""Requests are handed over in the order in which they came, also when a long text is read in a thread."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pannier.gateway.engine import Engine
from pannier.gateway.intake import LONG_CHARACTERS, Intake
from pannier.scheduler import Rejected
from pannier.wire.messages import ChatMessage, Generate, SamplingParams

pytestmark = pytest.mark.timeout(30)
LONG = "x" * (LONG_CHARACTERS + 1)


class FakeEngine:
    """Keeps what it is handed; reading a text waits until the test allows it."""

    def __init__(self) -> None:
        self.admission = SimpleNamespace(read=self._read)
        self.came: list[tuple[str, tuple[int, ...] | None]] = []
        self.refused: list[tuple[str, str]] = []
        self.readers: list[str] = []
        self.may_read = threading.Event()

    def generate(self, _: bytes, message: Generate, prompt: tuple[int, ...] | None = None) -> None:
        self.came.append((message.request, prompt))

    def refuse(self, _: bytes, message: Generate, rejected: Rejected) -> None:
        self.refused.append((message.request, rejected.code))

    def _read(self, message: Generate) -> tuple[int, ...]:
        self.readers.append(threading.current_thread().name)
        assert self.may_read.wait(10)
        if message.request == "wrong":
            raise Rejected("invalid", "prompt", "too long")
        return (len(message.prompt or ""),)


def ask(request: str, prompt: str | None = "x", **fields: Any) -> Generate:
    nothing = {"model": None, "prompt_tokens": None, "messages": None}
    return Generate(request=request, prompt=prompt, params=SamplingParams(), **{**nothing, **fields})


def run(main: Callable[[Intake, FakeEngine], Awaitable[None]]) -> None:
    """Run `main` beside an intake that serves."""

    async def serve() -> None:
        engine = FakeEngine()
        intake = Intake(lambda: cast(Engine, engine), max_waiting=3)
        serving = asyncio.ensure_future(intake.run())
        try:
            await main(intake, engine)
        finally:
            engine.may_read.set()
            serving.cancel()
            with suppress(asyncio.CancelledError):
                await serving

    asyncio.run(serve())


def test_a_short_text_is_handed_over_at_once() -> None:
    """Unread: the engine reads it."""

    async def main(intake: Intake, engine: FakeEngine) -> None:
        intake.take(b"c", ask("a"))
        intake.take(b"c", ask("b", None, prompt_tokens=(1,) * 2 * LONG_CHARACTERS))
        assert engine.came == [("a", None), ("b", None)]

    run(main)


def test_nobody_overtakes_a_long_text() -> None:
    """It is read in a thread while the loop goes on; what came behind it comes behind it."""

    async def main(intake: Intake, engine: FakeEngine) -> None:
        intake.take(b"c", ask("a", LONG))
        intake.take(b"c", ask("b"))
        await asyncio.sleep(0.05)
        assert (engine.came, len(intake)) == ([], 2)
        engine.may_read.set()
        await intake.until_empty()
        assert engine.came == [("a", (len(LONG),)), ("b", None)]
        assert engine.readers[0] != threading.main_thread().name
        intake.take(b"c", ask("c"))
        assert engine.came[-1] == ("c", None)

    run(main)


def test_a_long_conversation_is_read_in_a_thread_too() -> None:
    """Its turns count together."""

    async def main(intake: Intake, engine: FakeEngine) -> None:
        half = ChatMessage("user", LONG[: len(LONG) // 2 + 1])
        intake.take(b"c", ask("a", None, messages=(half, half)))
        assert len(intake) == 1
        engine.may_read.set()
        await intake.until_empty()
        assert engine.came == [("a", (0,))]

    run(main)


def test_what_is_cancelled_meanwhile_is_not_handed_over() -> None:
    """Whether it is being read or waits behind; another client's of the same name is."""

    async def main(intake: Intake, engine: FakeEngine) -> None:
        intake.take(b"c", ask("a", LONG))
        intake.take(b"c", ask("b"))
        intake.take(b"other", ask("b"))
        await asyncio.sleep(0.05)
        intake.cancel(b"c", "a")
        intake.cancel(b"c", "b")
        engine.may_read.set()
        await intake.until_empty()
        assert engine.came == [("b", None)]

    run(main)


def test_a_long_text_that_is_refused_holds_up_nobody() -> None:
    """Its client is told."""

    async def main(intake: Intake, engine: FakeEngine) -> None:
        intake.take(b"c", ask("wrong", LONG))
        intake.take(b"c", ask("b"))
        engine.may_read.set()
        await intake.until_empty()
        assert engine.refused == [("wrong", "invalid")]
        assert engine.came == [("b", None)]

    run(main)


def test_more_than_may_wait_are_refused() -> None:
    """As overloaded."""

    async def main(intake: Intake, engine: FakeEngine) -> None:
        intake.take(b"c", ask("0", LONG))
        for number in range(1, 5):
            intake.take(b"c", ask(str(number)))
        assert engine.refused == [("3", "overloaded"), ("4", "overloaded")]

    run(main)
