"""A span of every request for text, from its first byte to the last one of its answer."""

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pannier.runtime.tracing import Tracer

TRACED = "/v1/"
TRACEPARENT = "traceparent"


class Traced:
    """Its name is in the scope for those who ask the gateway. A client's `traceparent` says what it is a part of."""

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self._app = app
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, and note how it ends."""
        if scope["type"] != "http" or scope["method"] != "POST" or not scope["path"].startswith(TRACED):
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(TRACEPARENT.encode())
        parent = None if given is None else given.decode(errors="replace")
        span = self._tracer.begin(f"POST {scope['path']}", parent, kind="server")
        status = 0

        async def send_noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app({**scope, TRACEPARENT: span.traceparent}, receive, send_noted)
        finally:
            attributes = {"http.request.method": "POST", "url.path": scope["path"], "http.response.status_code": status}
            span.end(attributes, f"status {status}" if status >= 500 or not status else None)


def traceparent_of(http: Request) -> str | None:
    """What the gateway is told of a request's trace; None if it has none."""
    named: str | None = http.scope.get(TRACEPARENT)
    return named
