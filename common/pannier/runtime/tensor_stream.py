"""Messages with tensors over plain TCP: large ones are sent from where they lie, and received where they stay."""

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec
import torch

from pannier.net.tcp import Stream
from pannier.net.tcp.frame import ZEROS, write_head
from pannier.wire import ALIGNMENT, Decoder, Part, encode_header, payload_bytes
from pannier.wire.messages import Message
from pannier.wire.tensors import TensorMemory, pack, parts_of, unpack
from pannier.wire.traffic import Traffic

M = TypeVar("M", bound=Message)
SMALL = 64 << 10
"""Bytes of a payload that is packed rather than sent from several places: a copy of it costs less than their number."""


class TensorStream(Generic[M]):
    """One end of a connection, receiving the messages of one union."""

    def __init__(self, stream: Stream, union: Any, traffic: Traffic | None = None) -> None:
        self.stream = stream
        self._staging = TensorMemory(stream.reader.staging)
        self._decoder: Decoder[M] = Decoder(union, traffic)

    def send(self, message: Message, tensors: Sequence[torch.Tensor]) -> None:
        """Send, or keep until the stream's `flush`. Nobody may write into the tensors before it is sent.

        Raises `PeerGone` if the peer has left or stopped reading, and `WireError` if the message is too large.
        """
        if not tensors:
            self.stream.send([write_head(encode_header(message), 0, self.stream.largest)])
            return
        parts, payload = _payload(tensors)
        header = encode_header(msgspec.structs.replace(message, parts=parts))
        self.stream.send([write_head(header, payload_bytes(parts), self.stream.largest), *payload])

    def receive(self) -> tuple[M, list[torch.Tensor], bool] | None:
        """Message and tensors of the next message, and whether the tensors have memory of their own.

        Otherwise what is wanted of them after the next call must have been copied before. Raises `WireError` for what
        is no message.
        """
        record = self.stream.receive()
        if record is None:
            return None
        header, memory, start, stop = record
        message = self._decoder.decode_header(header, stop - start)
        parts = getattr(message, "parts", ())
        if memory is self.stream.reader.staging:
            return message, self._staging.views(parts, start), False
        return message, unpack(parts, memory[start:stop]), True


def _payload(tensors: Sequence[torch.Tensor]) -> tuple[tuple[Part, ...], list[memoryview]]:
    """Packed if it is small, else each tensor where it lies, with what lies between."""
    if sum([tensor.nbytes for tensor in tensors]) <= SMALL:
        parts, packed = pack(tensors)
        lying = [packed]
    else:
        parts = parts_of(tensors)
        lying = [tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data for tensor in tensors]
    pieces = []
    for piece in lying:
        pieces.append(piece)
        if short := -len(piece) % ALIGNMENT:
            pieces.append(ZEROS[:short])
    return parts, pieces
