"""The dialling end of a typed conversation, for asyncio."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Generic, NoReturn, TypeVar

import zmq
import zmq.asyncio

from pannier.net.errors import KeysRefused
from pannier.net.monitor import Monitor
from pannier.net.sockets import SocketOptions, connect
from pannier.wire import Buffer, Decoder, encode
from pannier.wire.messages import Message

M = TypeVar("M", bound=Message)
GLANCE_S = 0.1


class Connection(Generic[M]):
    """A DEALER that receives the messages of one union. Iterate in one long-lived task."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        union: Any,
        endpoint: str,
        identity: bytes,
        options: SocketOptions = SocketOptions(),
    ) -> None:
        self.endpoint = endpoint
        self._monitor = Monitor()
        self._socket = connect(context, zmq.DEALER, endpoint, options, identity, self._monitor)
        self._decoder: Decoder[M] = Decoder(union)

    async def __aiter__(self) -> AsyncIterator[tuple[M, memoryview]]:
        """Message and payload of everything that arrives. Raises `WireError` when the peer speaks another protocol."""
        while True:
            frames = await self._socket.recv_multipart(copy=False)
            yield self._decoder.decode([frame.buffer for frame in frames])

    async def until_refused(self) -> NoReturn:
        """Wait until the peer has turned this end away: it is not dialled again. Raises `KeysRefused`."""
        while (refusal := self._monitor.news().refusal) is None:  # noqa: ASYNC110  # libzmq's event, not asyncio's
            await asyncio.sleep(GLANCE_S)
        raise KeysRefused(f"{self.endpoint} can't be reached: {refusal}")

    async def send(self, message: Message, payload: Buffer | None = None) -> None:
        """Send, waiting while the peer's queue is full."""
        await self._socket.send_multipart(encode(message, payload), copy=False)

    def close(self) -> None:
        """Close the socket; what waits is dropped."""
        self._monitor.close()
        self._socket.close()
