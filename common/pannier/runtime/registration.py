"""A worker's side of the control channel: hello, welcome, then heartbeats until one of the two leaves."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, NoReturn

import structlog
import zmq.asyncio

from pannier.net import Connection, SocketOptions
from pannier.runtime.errors import GatewayLost, NotAccepted
from pannier.runtime.tasks import first_end
from pannier.wire import GatewayToWorker
from pannier.wire import messages as m

LOST_AFTER = 10
"""Heartbeats in a row that the gateway may leave unanswered before it counts as lost."""
PATIENCE_S = 10.0
"""How often a worker says hello, and in the log that it waits: a gateway may have read the last one, and ended."""
FAREWELL_S = 0.5
"""How long a worker that leaves waits for the gateway's goodbye: a socket that is closed drops what it hasn't sent."""
log = structlog.get_logger()


class Registration:
    """One worker's standing with its gateway."""

    def __init__(self, context: zmq.asyncio.Context, endpoint: str, hello: m.Hello, options: SocketOptions) -> None:
        self.hello = hello
        self._endpoint = endpoint
        self._connection: Connection[GatewayToWorker] = Connection(
            context, GatewayToWorker, endpoint, hello.name.encode(), options
        )
        self._incoming: AsyncIterator[tuple[GatewayToWorker, memoryview]] = aiter(self._connection)

    async def register(self) -> m.Welcome:
        """Say hello and wait for the gateway, however long it takes to appear. Raises `NotAccepted`, `KeysRefused`."""
        waiting = asyncio.ensure_future(anext(self._incoming))
        refused = asyncio.ensure_future(self._connection.until_refused())
        try:
            await self._wait(waiting, refused)
        finally:
            waiting.cancel()  # does nothing to an answer that is here
            refused.cancel()
        match waiting.result()[0]:
            case m.Welcome() as welcome:
                return welcome
            case m.Refused(reason=reason):
                raise NotAccepted(reason)
            case other:
                raise NotAccepted(f"the gateway answered a hello with {type(other).__name__}")

    async def _wait(self, waiting: asyncio.Future[Any], refused: asyncio.Future[NoReturn]) -> None:
        """Until there is an answer."""
        await self._connection.send(self.hello)
        ends = (waiting, refused)
        while not (await asyncio.wait(ends, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED))[0]:
            log.info("waiting for a gateway", endpoint=self._endpoint)
            await self._connection.send(self.hello)
        if not waiting.done():
            await refused

    async def keep_alive(self, welcome: m.Welcome, counters: Callable[[], dict[str, float]]) -> None:
        """Exchange heartbeats until the gateway says goodbye. Raises `GatewayLost`, `NotAccepted`."""
        self._unanswered = 0
        await first_end(self._beat(welcome, counters), self._listen())

    async def leave(self, reason: str) -> None:
        """Tell the gateway that this worker goes on purpose; its own goodbye ends `keep_alive`, mostly before this."""
        await self._connection.send(m.Goodbye(reason))
        await asyncio.sleep(FAREWELL_S)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    async def _beat(self, welcome: m.Welcome, counters: Callable[[], dict[str, float]]) -> None:
        # Counted, not timed: a process that was stopped for a while must not take its own silence for the gateway's.
        while self._unanswered < LOST_AFTER:
            await self._connection.send(m.Heartbeat(welcome.life, counters()))
            self._unanswered += 1
            await asyncio.sleep(welcome.heartbeat_s)
        raise GatewayLost(f"the gateway at {self._endpoint} has been silent for {LOST_AFTER} heartbeats")

    async def _listen(self) -> None:
        async for message, _ in self._incoming:
            self._unanswered = 0
            match message:
                case m.Goodbye():
                    return
                case m.Refused(reason=reason):
                    raise NotAccepted(reason)
