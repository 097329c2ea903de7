"""The receiving half of a connection: bytes as they come, frames as they are complete."""

import mmap
import socket
from collections.abc import Callable
from typing import NamedTuple

from pannier.net.tcp.frame import PREFIX, Extent, read_prefix

STAGING = 256 << 10
"""Bytes of the memory in which frames arrive; larger frames get memory of their own."""
GLANCE = 64 << 10
"""Bytes that are read before it is known what comes: what of a larger frame is among them is copied."""
AT_ONCE = 512 << 10
"""Bytes of a frame under way for which it is worth while to wake up, if so many are to come."""

Allocate = Callable[[int], memoryview]
"""Memory of so many bytes, which begins at a multiple of 64."""


class Record(NamedTuple):
    """A message: its header, and the memory in which its payload lies, from start to stop."""

    header: memoryview
    memory: memoryview
    start: int
    stop: int


class Reader:
    """Reads a socket that doesn't block.

    A frame in `staging` stays there until the next `receive`; a larger one is in memory that `allocate` has given.
    """

    def __init__(self, connection: socket.socket, limit: int, allocate: Allocate) -> None:
        self.limit = limit
        """Bytes of the largest frame."""
        self.is_ready = False
        """Whether `receive` may find something, as far as is known."""
        self.staging = memoryview(mmap.mmap(-1, STAGING, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        self._connection = connection
        self._allocate = allocate
        self._memory, self._start, self._stop = self.staging, 0, 0
        """What was read and not received yet."""
        self._extent: Extent | None = None
        """Of the frame at the start, once that is known."""
        self._is_drained = True
        self._wakes_at = 1

    def notice(self) -> None:
        """A poller says that there is something to read."""
        self.is_ready, self._is_drained = True, False

    def receive(self) -> Record | None:
        """The next frame that is complete; None when there is no more to read, until `notice`.

        Raises `WireError` for what is no frame, and `OSError` when the connection has ended.
        """
        while True:
            read, extent = self._stop - self._start, self._extent
            if extent is None and read >= PREFIX.size:
                extent = self._extent = read_prefix(self._memory, self._start, self.limit)
            if extent is not None and read >= extent.size:
                return self._take(extent)
            if self._is_drained or not self._fill(read):
                self.is_ready = False
                if extent is not None:
                    self._wake_at(extent.size - read)
                return None

    def _take(self, extent: Extent) -> Record:
        header_stop, payload_start, payload_stop, size = extent
        memory, start = self._memory, self._start
        record = Record(
            memory[start + PREFIX.size : start + header_stop], memory, start + payload_start, start + payload_stop
        )
        self._start, self._extent = start + size, None
        self._wake_at(1)
        if self._start == self._stop:
            self._memory, self._start, self._stop = self.staging, 0, 0
            self.is_ready = not self._is_drained
        return record

    def _fill(self, read: int) -> bool:
        """Read more; False if there is nothing."""
        room = self._make_room(read)
        try:
            count = self._connection.recv_into(room)
        except BlockingIOError:
            count = 0
        else:
            if not count:
                raise ConnectionError("the peer has hung up")
        self._stop += count
        self._is_drained = count < len(room)  # that was all: a poller says when there is more
        return count > 0

    def _wake_at(self, missing: int) -> None:
        """Have the poller say it when a good part of what is missing has come, not at every segment."""
        wakes_at = min(missing, AT_ONCE) if missing > GLANCE else 1
        if wakes_at != self._wakes_at:
            self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wakes_at)
            self._wakes_at = wakes_at

    def _make_room(self, read: int) -> memoryview:
        """Where to read into: of a large frame's memory no more than the frame, so that it holds nothing else."""
        extent = self._extent
        if extent is None:
            if self._start + PREFIX.size > STAGING:
                self._move(self.staging, read)
            return self.staging[self._stop : self._stop + GLANCE]
        if extent.size > STAGING and self._memory is self.staging:
            self._move(self._allocate(extent.size), read)
        elif self._start + extent.size > len(self._memory):
            self._move(self.staging, read)
        return self._memory[self._stop :]

    def _move(self, memory: memoryview, read: int) -> None:
        memory[:read] = self._memory[self._start : self._stop]
        self._memory, self._start, self._stop = memory, 0, read
