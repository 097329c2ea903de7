"""Whether requests would be served: not only that processes live, but that a token comes through all of them."""

import time
from collections.abc import Mapping
from typing import Any

from pannier.client import AsyncClient, ClientError

STATUS_S = 2.0
FRESH_S = 5.0
"""How long an answer to a probe is good for; probes come from several sides."""
PROOF_S = 10.0
"""How long a stack may be without a step before one is made to see whether it still can."""


class Readiness:
    """Asks the gateway, and if nothing has moved for a while has one token generated."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._steps = -1
        self._moved_at = float("-inf")
        self._said_at = float("-inf")
        self._reason: str | None = "nothing is known yet"

    async def why_not(self) -> str | None:
        """Why no request would be served now, or None."""
        if time.monotonic() - self._said_at > FRESH_S or self._reason is not None:
            self._reason = await self._ask()
            self._said_at = time.monotonic()
        return self._reason

    async def _ask(self) -> str | None:
        try:
            status = await self._client.status(timeout_s=STATUS_S)
        except ClientError as error:
            return f"the gateway does not answer: {error}"
        if not status["ready"]:
            return "the stack is starting, or stopping"
        self._note(status)
        return None if time.monotonic() - self._moved_at < PROOF_S else await self._prove()

    def _note(self, status: Mapping[str, Any]) -> None:
        steps = sum(lane["steps"] for lane in status["lanes"])
        if steps != self._steps and self._steps >= 0:
            self._moved_at = time.monotonic()
        self._steps = steps

    async def _prove(self) -> str | None:
        """One token, through compute and attention workers."""
        try:
            await self._client.complete([0], max_tokens=1, temperature=0.0, timeout_s=PROOF_S, deadline_s=PROOF_S)
        except ClientError as error:
            return f"a request for one token fails: {error}"
        self._moved_at = time.monotonic()
        return None
