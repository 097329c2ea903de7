"""Server-sent events: data as it comes, a comment now and then so that nobody in between hangs up."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, TypeAlias

from starlette.responses import StreamingResponse

from pannier.client import ClientError
from pannier.http.errors import ApiError, from_client

Events: TypeAlias = AsyncGenerator[dict[str, Any], None]
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
OPEN_S = 1.0
"""How long the answer's status waits for the first event, which may be an error; that of a long prompt comes later."""


def event(data: dict[str, Any]) -> bytes:
    """One event."""
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def event_response(events: Events, keep_alive_s: float) -> StreamingResponse:
    """The answer that streams these. Raises `ApiError` if the first of them does, soon enough."""
    first = asyncio.ensure_future(anext(events))
    done, _ = await asyncio.wait((first,), timeout=OPEN_S)
    if done and (error := first.exception()) is not None:
        raise _as_api_error(error)
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(_frames(first, events, keep_alive_s), headers=headers, media_type="text/event-stream")


async def _frames(
    upcoming: "asyncio.Future[dict[str, Any]]", events: Events, keep_alive_s: float
) -> AsyncIterator[bytes]:
    try:
        while True:
            done, _ = await asyncio.wait((upcoming,), timeout=keep_alive_s)
            if not done:
                yield KEEP_ALIVE
                continue
            yield event(upcoming.result())
            upcoming = asyncio.ensure_future(anext(events))
    except StopAsyncIteration:
        yield DONE
    except (ApiError, ClientError) as error:
        yield event(_as_api_error(error).body)
        yield DONE
    finally:
        upcoming.cancel()  # the client has left: what generates is closed with its iterator
        await asyncio.wait((upcoming,))
        await events.aclose()


def _as_api_error(error: BaseException) -> Any:
    return from_client(error) if isinstance(error, ClientError) else error
