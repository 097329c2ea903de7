"""What every request passes before its route: who asks, how much is sent, what the request is called."""

import hashlib
import hmac
import secrets
from collections.abc import Collection
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pannier.http.errors import ApiError

OPEN_PATHS = frozenset({"/livez", "/readyz", "/health", "/ping", "/"})
"""Those that need no key: whoever watches a process has none, and the page, which knows nothing, asks for it."""
OPEN_FOLDER = "/page/"
MAX_ID_CHARACTERS = 128


class Guard:
    """Checks keys and sizes, and gives every answer an `X-Request-Id`: the request's own if it has one."""

    def __init__(self, app: ASGIApp, api_keys: Collection[str], max_body_bytes: int) -> None:
        self._app = app
        self._keys = [_hash(key) for key in api_keys]
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or answer with an error."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        request_id = headers.get(b"x-request-id", b"")[:MAX_ID_CHARACTERS] or secrets.token_hex(8).encode()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            await send(message)

        try:
            self._check(scope, headers)
        except ApiError as error:
            await error.response()(scope, receive, send_with_id)
            return
        await self._app(scope, _Limited(receive, self._max_body_bytes), send_with_id)

    def _check(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        path: str = scope["path"]
        is_open = path in OPEN_PATHS or path.startswith(OPEN_FOLDER) or scope["method"] == "OPTIONS"
        if self._keys and not is_open:
            self._check_key(headers.get(b"authorization", b""))
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self._max_body_bytes:
            raise _too_large(self._max_body_bytes)

    def _check_key(self, authorization: bytes) -> None:
        scheme, _, key = authorization.decode(errors="replace").partition(" ")
        given = _hash(key.strip())
        # All of them are compared, so that the time tells nothing.
        matches = [hmac.compare_digest(given, known) for known in self._keys]
        if scheme.lower() != "bearer" or not any(matches):
            message = "this server needs an API key that it knows, sent as Authorization: Bearer KEY"
            raise ApiError(401, message, code="invalid_api_key")


class _Limited:
    """A body that says no length, or a wrong one, ends when it is too large."""

    def __init__(self, receive: Receive, max_bytes: int) -> None:
        self._receive = receive
        self._max_bytes = max_bytes
        self._left = max_bytes

    async def __call__(self) -> Any:
        """The next message. Raises `ApiError`."""
        message = await self._receive()
        self._left -= len(message.get("body", b""))
        if self._left < 0:
            raise _too_large(self._max_bytes)
        return message


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"the body is too large; at most {most} bytes are allowed", code="request_too_large")


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
