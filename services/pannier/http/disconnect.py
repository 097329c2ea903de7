"""A client that has left wants no answer: work for it stops."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

CLIENT_CLOSED_REQUEST = 499
"""Nobody reads it; it is what logs say."""


async def unless_disconnected(http: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """The work's answer, or none once the client has left; the body must have been read. Raises as the work does."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(http))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.wait((working, leaving))


async def _left(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
