"""One link's shared memory: what lies where in it, and how it is made, handed over and checked.

It is a memfd: it has no name, so nothing of it is left once both processes are gone, however they ended.

::

    lines of 128 bytes   asleep to attention | asleep to compute | written, freed, slots of every ring
    pages                rings to attention, one a lane | rings to compute, one a lane

Each counter and flag has a line of its own (two cache lines: processors fetch them in pairs), since the two processes
write them at the same time.
"""

import ctypes
import fcntl
import mmap
import os
from enum import IntEnum

import msgspec

from pannier.net.shm.compiled import SLOT_BYTES, SLOTS
from pannier.net.shm.errors import CannotShare

LINE = 128
CONTROL = 2 * LINE + SLOTS * SLOT_BYTES
"""Bytes of a ring's counters and slots."""
PAGE = 4096
MAX_LANES = 64
MAX_BYTES = 16 << 30
"""Of one link: more is a mistake. Pages that nothing was written to take no memory."""
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""Nobody can change its length any more: who reads where a page has gone is killed by SIGBUS."""


class Direction(IntEnum):
    """Where a ring's messages go."""

    TO_ATTENTION = 0
    TO_COMPUTE = 1


class RingPlace(msgspec.Struct, frozen=True):
    """Byte offsets of one ring, and its length."""

    written: int
    freed: int
    slots: int
    start: int
    capacity: int


class Layout(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How many lanes there are, and how many bytes each one's ring has, to attention and to compute."""

    lanes: int
    capacities: tuple[int, int]

    def check(self) -> None:
        """Raise `CannotShare` for sizes that can't be right."""
        if not 1 <= self.lanes <= MAX_LANES:
            raise CannotShare(f"a link has 1 to {MAX_LANES} lanes, not {self.lanes}")
        if any(capacity < PAGE or capacity % PAGE for capacity in self.capacities):
            raise CannotShare(f"rings have whole pages of {PAGE} bytes, not {self.capacities}")
        if self.total > MAX_BYTES:
            raise CannotShare(f"a link's shared memory of {self.total} bytes is above the limit of {MAX_BYTES}")

    @property
    def total(self) -> int:
        """Bytes of all."""
        return self._first_ring + self.lanes * sum(self.capacities)

    @property
    def _first_ring(self) -> int:
        return -(-(2 * LINE + 2 * self.lanes * CONTROL) // PAGE) * PAGE

    def asleep(self, direction: Direction) -> int:
        """Byte offset of the flag that says that the reader of this direction sleeps."""
        return LINE * direction

    def ring(self, direction: Direction, lane: int) -> RingPlace:
        """Where one lane's ring is."""
        control = 2 * LINE + (direction * self.lanes + lane) * CONTROL
        before = direction * self.lanes * self.capacities[0] + lane * self.capacities[direction]
        slots = control + 2 * LINE
        return RingPlace(control, control + LINE, slots, self._first_ring + before, self.capacities[direction])


class Memory:
    """A mapped segment. It is unmapped when nobody refers to it any more, views of it included."""

    def __init__(self, file: int, layout: Layout) -> None:
        self.layout = layout
        self.view = memoryview(mmap.mmap(file, layout.total))
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.view))


def make(layout: Layout) -> tuple[Memory, int]:
    """A new segment, all zero, and the file to hand over. Raises `CannotShare`."""
    layout.check()
    try:
        file = os.memfd_create("pannier-link", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(file, layout.total)
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, SEALS)
            return Memory(file, layout), file
        except BaseException:
            os.close(file)
            raise
    except OSError as error:
        raise CannotShare(f"no shared memory of {layout.total} bytes: {error.strerror}") from error


def take(file: int, layout: Layout) -> Memory:
    """Map a segment that another process made. Raises `CannotShare` unless it is what `layout` says, for good."""
    layout.check()
    try:
        seals, length = fcntl.fcntl(file, fcntl.F_GET_SEALS), os.fstat(file).st_size
    except OSError as error:
        raise CannotShare(f"what was handed over is no shared memory: {error.strerror}") from error
    if seals & SEALS != SEALS or length != layout.total:
        raise CannotShare(f"{length} bytes of memory came with seals {seals:#x}; due are {layout.total} and {SEALS:#x}")
    return Memory(file, layout)
