"""Messages with tensors through shared memory: packed where they will be read, and read where they lie."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import msgspec
import torch
import zmq

from pannier.net.outbox import Frames, Outbox
from pannier.net.shm import Channel
from pannier.wire import Decoder, WireError, encode_header, payload_bytes
from pannier.wire.messages import Message
from pannier.wire.tensors import TensorMemory, encode_with, parts_of
from pannier.wire.traffic import Traffic

M = TypeVar("M", bound=Message)


class TensorChannel(Generic[M]):
    """One end of a same-host link, receiving the messages of one union. Every lane has rings of its own."""

    def __init__(self, channel: Channel, union: Any, traffic: Traffic | None = None) -> None:
        self.channel = channel
        self._memory = TensorMemory(channel.memory.view)
        self._decoder: Decoder[M] = Decoder(union, traffic)
        self._outboxes = [Outbox(partial(self._send_frames, lane)) for lane in range(len(channel.writers))]

    def send(self, lane: int, message: Message, tensors: Sequence[torch.Tensor]) -> None:
        """Send, or keep a copy until `flush`. Raises `PeerGone` when the peer has stopped reading.

        Raises `WireError` if the message is larger than the ring allows.
        """
        outbox = self._outboxes[lane]
        if len(outbox) or not self._send_now(lane, message, tensors):
            outbox.put(encode_with(message, tensors))

    def receive(self) -> tuple[int, M, list[torch.Tensor]] | None:
        """Lane, message and tensors of the next message, until `release`. Raises `WireError` for what is none.

        The tensors lie in the ring: what is wanted of them after `release` must have been copied before.
        """
        received = self.channel.receive()
        if received is None:
            return None
        lane, header, start, length = received
        try:
            message = self._decoder.decode_header(header, length)
        except WireError:
            self.channel.release()
            raise
        return lane, message, self._memory.views(getattr(message, "parts", ()), start)

    def release(self) -> None:
        """Give the memory of the message received last back to the peer."""
        self.channel.release()

    def flush(self) -> bool:
        """Send what was kept as far as there is room; True if nothing is left."""
        for outbox in self._outboxes:
            outbox.flush()
        return not any(map(len, self._outboxes))

    def close(self) -> None:
        """Hang up; what was kept is dropped."""
        self._outboxes.clear()  # they refer to this end, which would keep the memory until the next garbage collection
        self.channel.close()

    def _send_now(self, lane: int, message: Message, tensors: Sequence[torch.Tensor]) -> bool:
        parts = parts_of(tensors)
        header = encode_header(msgspec.structs.replace(message, parts=parts) if parts else message)
        start = self.channel.writers[lane].reserve(header, payload_bytes(parts))
        if start is None:
            return False
        self._memory.write(parts, start, tensors)
        self.channel.publish(lane)
        return True

    def _send_frames(self, lane: int, frames: Frames) -> None:
        header, payload = bytes(frames[0]), memoryview(frames[1] if len(frames) > 1 else b"").cast("B")
        start = self.channel.writers[lane].reserve(header, len(payload))
        if start is None:
            raise zmq.Again
        self.channel.memory.view[start : start + len(payload)] = payload
        self.channel.publish(lane)
