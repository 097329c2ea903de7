"""A ring of messages in shared memory: one process writes, one reads, in order.

A message is one piece of memory, so that tensors can be packed where they will be read: its header, and behind it, at
the next 64 bytes, its payload. Where each one is, a slot says::

    place, header length, payload length, unused (8 bytes each)

Two counters say how many messages were written and freed since the beginning; message number n has slot n % 64. Memory
is given out in turn, around the end too, and anew from the front when nothing is under way.
"""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

from pannier.net.shm.compiled import CMessage, CRing, functions
from pannier.net.shm.memory import Memory, RingPlace
from pannier.wire import ALIGNMENT, WireError

NOTHING, NONSENSE = -1, -2
FULL = -1


class Ring:
    """One end of a ring, as the compiled part knows it."""

    def __init__(self, memory: Memory, place: RingPlace, asleep: int) -> None:
        self.start = place.start
        self._memory = memory
        shared = [memory.address + at for at in (place.slots, place.written, place.freed, asleep)]
        self._ring = CRing(memory.address + place.start, place.capacity, *shared)
        self.address = ctypes.addressof(self._ring)


class Writer(Ring):
    """The writing end."""

    def __init__(self, memory: Memory, place: RingPlace, asleep: int) -> None:
        super().__init__(memory, place, asleep)
        self._capacity = place.capacity
        self._reserve = functions().reserve
        self._publish = functions().publish

    def reserve(self, header: bytes, payload_bytes: int) -> int | None:
        """Write the header; where in the shared memory the payload goes, or None while the ring is too full.

        Nobody sees the message before `publish`. Raises `WireError` if it is larger than the ring allows.
        """
        size = len(header) + payload_bytes + 2 * ALIGNMENT
        if size > self._capacity:
            raise WireError(f"a message of {size} bytes is larger than shared memory takes, which is {self._capacity}")
        place: int = self._reserve(self.address, header, len(header), payload_bytes)
        return None if place == FULL else self.start + place

    def publish(self) -> bool:
        """Let the reader see what was reserved; True if it sleeps and is to be rung."""
        return bool(self._publish(self.address))


class Record(NamedTuple):
    """A message in its ring: its lane, a copy of its header, and where its payload is in the shared memory."""

    lane: int
    header: bytes
    start: int
    length: int


class Readers:
    """The reading ends of all lanes' rings, looked at in turn."""

    def __init__(self, memory: Memory, places: Sequence[RingPlace], asleep: int) -> None:
        self.rings = [Ring(memory, place, asleep) for place in places]
        self._memory = memory
        self._all = Addresses(self.rings)
        self._message = CMessage()
        self._message_at = ctypes.addressof(self._message)
        self._receive = functions().receive
        self._release = functions().release
        self._turn = 0
        self._shown: Ring | None = None

    def receive(self) -> Record | None:
        """The next message, which stays where it is until `release`. Raises `WireError` if there is nonsense."""
        lane: int = self._receive(self._all.address, self._all.count, self._turn, self._message_at)
        if lane == NOTHING:
            return None
        if lane == NONSENSE:
            raise WireError("what is in shared memory is no message")
        ring = self._shown = self.rings[lane]
        self._turn = lane + 1 if lane + 1 < self._all.count else 0
        message = self._message
        first = ring.start + message.header
        header = bytes(self._memory.view[first : first + message.header_length])
        return Record(lane, header, ring.start + message.payload, message.payload_length)

    def release(self) -> None:
        """Give the memory of the message received last back to its writer."""
        assert self._shown is not None
        self._release(self._shown.address)
        self._shown = None


class Addresses:
    """Rings as the compiled part takes them: an array of addresses. It keeps them alive."""

    def __init__(self, rings: Sequence[Ring]) -> None:
        self.count = len(rings)
        self._rings = rings
        self._array = (ctypes.c_void_p * max(1, self.count))(*[ring.address for ring in rings])
        self.address = ctypes.addressof(self._array)
