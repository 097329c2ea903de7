"""Messages to frames and back: one msgpack header frame, then at most one payload frame."""

from collections.abc import Sequence
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec

from pannier.wire.errors import WireError
from pannier.wire.messages import Message
from pannier.wire.parts import Part, check_parts
from pannier.wire.traffic import Traffic

Buffer: TypeAlias = bytes | bytearray | memoryview
M = TypeVar("M", bound=Message)

_encoder = msgspec.msgpack.Encoder()


def encode(message: Message, payload: Buffer | None = None) -> list[Buffer]:
    """Frames of `message`; `payload` holds its parts.

    Raises `WireError` when parts and payload do not fit, so that a mistake is found where it is made.
    """
    _check_payload(message, payload)
    header = _encoder.encode(message)
    return [header] if payload is None else [header, payload]


def encode_header(message: Message) -> bytes:
    """The header frame of `message`, whose payload the caller lays out itself."""
    return _encoder.encode(message)


class Decoder(Generic[M]):
    """Validating decoder of one direction's union of messages; on links it counts them in `traffic`."""

    def __init__(self, union: Any, traffic: Traffic | None = None) -> None:
        self._decoder = msgspec.msgpack.Decoder(union)
        self._traffic = traffic

    def decode(self, frames: Sequence[Buffer]) -> tuple[M, memoryview]:
        """The message and its payload (empty when it has no parts). Raises `WireError`."""
        if not 1 <= len(frames) <= 2:
            raise WireError(f"a message has one or two frames, not {len(frames)}")
        message, payload = self._decode(frames[0]), memoryview(frames[1]).cast("B") if len(frames) == 2 else None
        _check_payload(message, payload)
        self._count(message, frames[0], 0 if payload is None else payload.nbytes)
        return message, payload or memoryview(b"")

    def decode_header(self, header: Buffer, payload_length: int) -> M:
        """A message whose payload of so many bytes, 0 if it has no parts, lies elsewhere. Raises `WireError`."""
        message = self._decode(header)
        check_parts(getattr(message, "parts", ()), payload_length)
        self._count(message, header, payload_length)
        return message

    def _count(self, message: M, header: Buffer, payload_bytes: int) -> None:
        if self._traffic is not None:
            self._traffic.count(message, memoryview(header).nbytes, payload_bytes)

    def _decode(self, header: Buffer) -> M:
        try:
            message: M = self._decoder.decode(header)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise WireError(f"not a message of this protocol: {error}") from error
        return message


def _check_payload(message: Message, payload: Buffer | None) -> None:
    parts: tuple[Part, ...] = getattr(message, "parts", ())
    if (payload is None) == bool(parts):
        raise WireError(f"{type(message).__name__} has {len(parts)} parts, and {'no' if parts else 'a'} payload frame")
    if payload is not None:
        check_parts(parts, memoryview(payload).nbytes)
