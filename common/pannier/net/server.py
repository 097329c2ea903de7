"""The listening end of a typed conversation, for asyncio."""

import asyncio
import logging
from collections.abc import AsyncIterator
from itertools import count
from typing import Any, Generic, TypeVar, cast

import zmq
import zmq.asyncio

from pannier.net.errors import PeerGone
from pannier.net.monitor import Monitor
from pannier.net.outbox import Frames, Outbox
from pannier.net.sockets import SocketOptions, bind, close_bound
from pannier.wire import Buffer, Decoder, WireError, encode
from pannier.wire.messages import Message

M = TypeVar("M", bound=Message)
RETRY_S = 0.002
BATCH = 16
"""Messages received in a row before other tasks of the loop have their turn."""
log = logging.getLogger(__name__)  # not structlog: clients import this package


class Server(Generic[M]):
    """A ROUTER that receives the messages of one union and never blocks in `send`.

    `endpoint` is the real one. Iterate in one long-lived task: cancelling a task inside a receive loses messages.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        union: Any,
        endpoint: str,
        options: SocketOptions = SocketOptions(),
    ) -> None:
        self._monitor = Monitor() if options.curve is not None else None
        self._socket, self.endpoint = bind(context, zmq.ROUTER, endpoint, options, self._monitor)
        self._decoder: Decoder[M] = Decoder(union)
        self._outboxes: dict[bytes, Outbox] = {}
        self._flusher: asyncio.Task[None] | None = None
        self.refused_frames = 0
        self._refused_handshakes = 0

    @property
    def refused_handshakes(self) -> int:
        """How many have dialled without a key that is known; to be looked at now and then."""
        if self._monitor is not None:
            self._refused_handshakes += self._monitor.news().failed_handshakes
        return self._refused_handshakes

    async def __aiter__(self) -> AsyncIterator[tuple[bytes, M, memoryview]]:
        """Peer, message and payload of everything that arrives; what is not a message is counted and dropped."""
        for number in count(1):
            if number % BATCH == 0:
                await asyncio.sleep(0)  # a receive returns at once while there is something: others' turn
            frames = await self._socket.recv_multipart(copy=False)
            peer, *body = [frame.buffer for frame in frames]
            try:
                message, payload = self._decoder.decode(body)
            except WireError as error:
                self.refused_frames += 1
                log.warning("a message of peer %s is refused: %s", bytes(peer).hex(), error)
                continue
            yield bytes(peer), message, payload

    def send(self, peer: bytes, message: Message, payload: Buffer | None = None, *, always: bool = False) -> None:
        """Send or queue. Raises `PeerGone`, as `Outbox.put` does."""
        outbox = self._outboxes.get(peer) or self._outboxes.setdefault(
            peer, Outbox(lambda frames: self._send_now(peer, frames))
        )
        try:
            outbox.put(encode(message, payload), always=always)
        finally:
            if len(outbox):
                self._start_flushing()
            else:
                del self._outboxes[peer]

    async def close(self) -> None:
        """Close the socket; what waits is dropped."""
        if self._flusher is not None:
            self._flusher.cancel()
            await asyncio.gather(self._flusher, return_exceptions=True)
        self._outboxes.clear()
        if self._monitor is not None:
            self._monitor.close()
        close_bound(self._socket, self.endpoint)

    def _send_now(self, peer: bytes, frames: Frames) -> None:
        # With NOBLOCK the future is already done: the message went out whole, or an exception says why not.
        sent = self._socket.send_multipart([peer, *frames], flags=zmq.NOBLOCK, copy=False)
        cast("asyncio.Future[object]", sent).result()

    def _start_flushing(self) -> None:
        if self._flusher is None or self._flusher.done():
            self._flusher = asyncio.create_task(self._flush_until_empty())

    async def _flush_until_empty(self) -> None:
        while self._outboxes:
            await asyncio.sleep(RETRY_S)
            for peer, outbox in list(self._outboxes.items()):
                try:
                    done = outbox.flush()
                except PeerGone:
                    done = True
                if done:
                    self._outboxes.pop(peer, None)
