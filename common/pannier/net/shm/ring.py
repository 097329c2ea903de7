"""A ring of messages in shared memory: one process writes, one reads, in order.

A message is one piece of memory, so that tensors can be packed where they will be read::

    header length, payload length (8 bytes each) | header | payload, 64-byte aligned | up to the next 64 bytes

What doesn't fit before the ring's end goes to its start, and a mark says so. A ring that is empty starts again at the
front too: a lane that asks and waits in turn uses the same memory all the time, which stays in the caches.

Counters say how many bytes were written and freed since the beginning, skipped ones included; they never go back.
"""

import ctypes
import struct
from typing import NamedTuple

from pannier.net.shm.atomics import atomics
from pannier.net.shm.memory import Memory, RingPlace
from pannier.wire import ALIGNMENT, Buffer, WireError

LENGTHS = struct.Struct("<QQ")
SKIP = (1 << 64) - 1
"""In place of a header length: go on at the ring's start."""


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class Writer:
    """The writing end."""

    def __init__(self, memory: Memory, place: RingPlace, asleep: int) -> None:
        self.largest = place.capacity // 2
        """Bytes of the largest message with its header: what fits whatever the place at which an empty ring stands."""
        self._view = memory.view
        self._place = place
        self._atomics = atomics()
        self._written_at = memory.address + place.written
        self._freed_at = memory.address + place.freed
        self._asleep_at = memory.address + asleep
        self._written = 0
        self._reserved = 0

    def reserve(self, header: Buffer, payload_bytes: int) -> int | None:
        """Write the header; where in the shared memory the payload goes, or None while the ring is too full.

        Nobody sees the message before `publish`. Raises `WireError` if it is larger than the ring allows.
        """
        start = _aligned(LENGTHS.size + len(header))
        size = start + _aligned(payload_bytes)
        if size > self.largest:
            raise WireError(f"a message of {size} bytes is larger than shared memory takes, which is {self.largest}")
        at = self._find_room(size)
        if at is None:
            return None
        LENGTHS.pack_into(self._view, at, len(header), payload_bytes)
        self._view[at + LENGTHS.size : at + LENGTHS.size + len(header)] = header
        self._reserved = size
        return at + start

    def publish(self) -> bool:
        """Let the reader see what was reserved; True if it sleeps and is to be rung."""
        self._written += self._reserved
        self._reserved = 0
        return bool(self._atomics.post(self._written_at, self._written, self._asleep_at))

    def _find_room(self, size: int) -> int | None:
        freed: int = self._atomics.load(self._freed_at)
        start, capacity = self._place.start, self._place.capacity
        at = self._written % capacity
        rest = capacity - at
        goes_to_start = at > 0 and (size > rest or (freed == self._written and rest + size <= capacity))
        if self._written - freed + size + rest * goes_to_start > capacity:
            return None
        if goes_to_start:
            LENGTHS.pack_into(self._view, start + at, SKIP, 0)
            self._written += rest
            at = 0
        return start + at


class Record(NamedTuple):
    """A message in the ring: a copy of its header, and where its payload is in the shared memory."""

    header: bytes
    start: int
    length: int


class Reader:
    """The reading end. What it finds is checked: the writer is another process, which may have gone mad."""

    def __init__(self, memory: Memory, place: RingPlace) -> None:
        self._view = memory.view
        self._place = place
        self._atomics = atomics()
        self.written_at = memory.address + place.written
        self._freed_at = memory.address + place.freed
        self._read = ctypes.c_uint64(0)
        self.read_at = ctypes.addressof(self._read)
        """Address of the reader's position, which is for itself: what is freed is told apart."""
        self._size = 0

    def peek(self) -> Record | None:
        """The next message, which stays where it is until `release`. Raises `WireError` if there is nonsense."""
        there = self._atomics.load(self.written_at) - self._read.value
        if not there:
            return None
        at = self._read.value % self._place.capacity
        rest = self._place.capacity - at
        place = self._place.start + at
        header_length, length = LENGTHS.unpack_from(self._view, place)
        if header_length == SKIP and at and rest < there:
            self._read.value += rest
            return self.peek()
        start = _aligned(LENGTHS.size + header_length)
        self._size = start + _aligned(length)
        if not self._size <= min(there, rest):
            raise WireError(f"a message of {self._size} bytes in {there} of a ring with {rest} to its end")
        first = place + LENGTHS.size
        return Record(bytes(self._view[first : first + header_length]), place + start, length)

    def release(self) -> None:
        """Give the memory of the message that `peek` has shown back to the writer."""
        self._read.value += self._size
        self._size = 0
        self._atomics.store(self._freed_at, self._read.value)
