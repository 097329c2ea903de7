"""Tensor parts: how several tensors share the one payload frame of a message.

Every part starts at a multiple of `ALIGNMENT` bytes, is contiguous, and its length follows from its dtype and
shape alone, so a receiver knows the exact frame length before it looks at a byte.
"""

from collections.abc import Iterable
from functools import lru_cache
from math import prod

import msgspec

from pannier.wire.dtypes import Dtype
from pannier.wire.errors import WireError

ALIGNMENT = 64  # bytes; a cache line, and what vector loads like best
MAX_ELEMENTS = 1 << 48
MAX_DIMENSIONS = 8
REMEMBERED = 1024
"""Layouts: every call of a model has the same as the one before."""


class Part(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One tensor inside the payload frame: element type, shape and byte offset."""

    dtype: Dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor, padding not counted."""
        return prod(self.shape) * self.dtype.itemsize


def lay_out(tensors: Iterable[tuple[Dtype, tuple[int, ...]]]) -> tuple[Part, ...]:
    """Place tensors one after the other, each aligned; see `payload_bytes` for the frame's length."""
    return _lay_out(tuple(tensors))


@lru_cache(REMEMBERED)
def _lay_out(tensors: tuple[tuple[Dtype, tuple[int, ...]], ...]) -> tuple[Part, ...]:
    parts, offset = [], 0
    for dtype, shape in tensors:
        part = Part(dtype, shape, offset)
        parts.append(part)
        offset += -(-part.nbytes // ALIGNMENT) * ALIGNMENT
    return tuple(parts)


def payload_bytes(parts: tuple[Part, ...]) -> int:
    """Length of the payload frame that holds `parts`; 0 when there are none."""
    return parts[-1].offset + parts[-1].nbytes if parts else 0


@lru_cache(REMEMBERED)  # of those that are right
def check_parts(parts: tuple[Part, ...], payload_length: int) -> None:
    """Raise `WireError` unless `parts` are laid out by `lay_out` and fill exactly `payload_length` bytes."""
    for part in parts:
        if len(part.shape) > MAX_DIMENSIONS:  # before they are multiplied
            raise WireError(f"a part has {len(part.shape)} dimensions; at most {MAX_DIMENSIONS} are possible")
        if any(size < 0 for size in part.shape):
            raise WireError(f"a part has a negative size: {part}")
        if prod(size or 1 for size in part.shape) > MAX_ELEMENTS:  # an empty tensor has strides all the same
            raise WireError(f"a part has a size that no tensor can have: {part}")
    if parts != lay_out((part.dtype, part.shape) for part in parts):
        raise WireError(f"parts are not laid out at {ALIGNMENT}-byte boundaries one after the other: {parts}")
    if payload_bytes(parts) != payload_length:
        raise WireError(f"the payload frame has {payload_length} bytes where its parts take {payload_bytes(parts)}")
