"""The dialling end of a typed conversation, for asyncio."""

from collections.abc import AsyncIterator
from typing import Any, Generic, TypeVar

import zmq
import zmq.asyncio

from pannier.net.sockets import SocketOptions, connect
from pannier.wire import Buffer, Decoder, encode
from pannier.wire.messages import Message

M = TypeVar("M", bound=Message)


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
        self._socket = connect(context, zmq.DEALER, endpoint, options, identity)
        self._decoder: Decoder[M] = Decoder(union)

    async def __aiter__(self) -> AsyncIterator[tuple[M, memoryview]]:
        """Message and payload of everything that arrives. Raises `WireError` when the peer speaks another protocol."""
        while True:
            frames = await self._socket.recv_multipart(copy=False)
            yield self._decoder.decode([frame.buffer for frame in frames])

    async def send(self, message: Message, payload: Buffer | None = None) -> None:
        """Send, waiting while the peer's queue is full."""
        await self._socket.send_multipart(encode(message, payload), copy=False)

    def close(self) -> None:
        """Close the socket; what waits is dropped."""
        self._socket.close()
