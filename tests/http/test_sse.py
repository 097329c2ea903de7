"""Streams as clients read them: silence is broken by comments, errors come as events, who leaves ends the work."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest

from pannier.client import RequestFailed
from pannier.http.errors import ApiError, invalid
from pannier.http.sse import DONE, KEEP_ALIVE, OPEN_S, Events, event_response

pytestmark = pytest.mark.timeout(30)
Make = Callable[[], Events]
LONG_S = 1000.0


def frames(make: Make, keep_alive_s: float = LONG_S) -> list[bytes]:
    """All that is sent. Raises `ApiError` if the answer is one from the start."""

    async def main() -> list[bytes]:
        response = await event_response(make(), keep_alive_s)
        assert response.media_type == "text/event-stream"
        return [bytes(frame) async for frame in response.body_iterator]  # type: ignore[arg-type]

    return asyncio.run(main())


async def numbers(*steps: int | float | Exception) -> AsyncGenerator[dict[str, Any], None]:
    """An event for each whole number, a pause for others, and an end for an error."""
    for step in steps:
        if isinstance(step, Exception):
            raise step
        if isinstance(step, float):
            await asyncio.sleep(step)
        else:
            yield {"n": step}


def test_events_end_with_done_and_a_blank_line() -> None:
    assert frames(lambda: numbers(1, 2)) == [b'data: {"n":1}\n\n', b'data: {"n":2}\n\n', b"data: [DONE]\n\n"]


def test_text_of_any_script_is_sent_as_it_is() -> None:
    async def words() -> Events:
        yield {"text": "слово 言葉 🐂\n"}

    (frame, _) = frames(words)
    assert "слово 言葉 🐂" in frame.decode()
    assert json.loads(frame.removeprefix(b"data: ")) == {"text": "слово 言葉 🐂\n"}


def test_silence_is_broken_by_comments() -> None:
    """Nobody in between hangs up; clients don't see them."""
    sent = frames(lambda: numbers(1, 0.2, 2), keep_alive_s=0.02)
    assert sent.count(KEEP_ALIVE) >= 2
    assert [frame for frame in sent if frame != KEEP_ALIVE] == frames(lambda: numbers(1, 2))


@pytest.mark.parametrize("error", [invalid("prompt", "wrong"), RequestFailed("overloaded", None, "full")])
def test_an_error_before_the_first_event_is_the_answer(error: Exception) -> None:
    """With a status of its own, as nothing has been sent."""
    with pytest.raises(ApiError) as raised:
        frames(lambda: numbers(error))
    assert raised.value.status in (400, 429)


@pytest.mark.parametrize("first", [1, OPEN_S + 0.1])
def test_a_later_error_is_an_event_with_an_error_on_top(first: int | float) -> None:
    """In the middle, or where the status had to be said before it."""
    sent = frames(lambda: numbers(first, RequestFailed("unavailable", None, "a worker is gone")))
    *_, last, done = sent
    assert done == DONE
    error = json.loads(last.removeprefix(b"data: "))["error"]
    assert (error["message"], error["type"], error["code"]) == (
        "a worker is gone", "ServiceUnavailableError", "unavailable",
    )  # fmt: skip


def test_who_leaves_ends_the_work() -> None:
    """Even while it waits for what doesn't come."""
    ended: list[str] = []

    async def endless() -> Events:
        try:
            yield {"n": 1}
            await asyncio.Event().wait()
        finally:
            ended.append("closed")

    async def main() -> None:
        response = await event_response(endless(), LONG_S)
        body = response.body_iterator
        assert await anext(aiter(body)) == b'data: {"n":1}\n\n'
        reading = asyncio.ensure_future(anext(aiter(body)))
        await asyncio.sleep(0)
        reading.cancel()
        await asyncio.wait((reading,))

    asyncio.run(main())
    assert ended == ["closed"]
