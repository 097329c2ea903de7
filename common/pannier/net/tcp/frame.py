"""Frames: how a message's header and its payload follow each other in a stream of bytes.

::

    magic (4 bytes), header length (4), payload length (8), little-endian
    the header, and zeros up to the next multiple of 64 bytes
    the payload, and anything up to the next multiple of 64 bytes

Every length is a multiple of 64: whoever reads into aligned memory finds every payload aligned, and what is read in one
piece with the frame before it, too.
"""

import struct
from functools import lru_cache
from typing import NamedTuple

from pannier.wire import ALIGNMENT, WireError
from pannier.wire.parts import REMEMBERED

MAGIC = b"PNR1"
"""The last character is the version."""
PREFIX = struct.Struct("<4sIQ")
ZEROS = memoryview(bytes(ALIGNMENT))


class Extent(NamedTuple):
    """Where things are in a frame."""

    header_stop: int
    payload_start: int
    payload_stop: int
    size: int


@lru_cache(REMEMBERED)  # of those that are right
def extent(header_length: int, payload_length: int, limit: int) -> Extent:
    """Of a frame with a header and a payload of so many bytes. Raises `WireError` if it has more than `limit`."""
    header_stop = PREFIX.size + header_length
    payload_start = -(-header_stop // ALIGNMENT) * ALIGNMENT
    payload_stop = payload_start + payload_length
    size = -(-payload_stop // ALIGNMENT) * ALIGNMENT
    if size > limit:
        raise WireError(f"a message of {size} bytes is larger than this connection takes, which is {limit}")
    return Extent(header_stop, payload_start, payload_stop, size)


def write_head(header: bytes, payload_length: int, limit: int) -> bytes:
    """What precedes a payload. Raises `WireError` if both together have more than `limit` bytes."""
    start = extent(len(header), payload_length, limit).payload_start
    return (PREFIX.pack(MAGIC, len(header), payload_length) + header).ljust(start, b"\0")


def read_prefix(memory: memoryview, start: int, limit: int) -> Extent:
    """Of the frame at `start`. Raises `WireError` if none begins there, or one of more than `limit` bytes."""
    magic, header_length, payload_length = PREFIX.unpack_from(memory, start)
    if magic != MAGIC:
        raise WireError(f"{magic!r} begins no frame")
    return extent(header_length, payload_length, limit)
