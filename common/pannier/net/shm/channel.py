"""One end of a same-host link: a ring for each lane and direction, and the unix socket over which it was agreed.

The socket carries no messages. It is the bell, rung with one byte when the peer sleeps, and its end is the peer's end,
which the system tells at once, whatever the peer died of.
"""

import ctypes
import logging
import socket

from pannier.net.shm.atomics import atomics
from pannier.net.shm.memory import Direction, Memory
from pannier.net.shm.ring import Reader, Record, Writer
from pannier.wire import WireError

RING = b"\0"
log = logging.getLogger(__name__)


class Addresses:
    """An array of addresses, as the helper takes them. It keeps alive what `owners` are."""

    def __init__(self, addresses: list[int]) -> None:
        self.count = len(addresses)
        self._array = (ctypes.c_void_p * max(1, self.count))(*addresses)
        self.address = ctypes.addressof(self._array)


class Channel:
    """The end that writes in one direction and reads in the other. Nothing here blocks."""

    def __init__(self, memory: Memory, writes: Direction, bell: socket.socket, peer: str) -> None:
        self.memory = memory
        self.peer = peer
        self.is_lost = False
        """The peer has gone; what it wrote before can still be read."""
        layout, reads = memory.layout, Direction(1 - writes)
        lanes = range(layout.lanes)
        self.writers = [Writer(memory, layout.ring(writes, lane), layout.asleep(writes)) for lane in lanes]
        self.readers = [Reader(memory, layout.ring(reads, lane)) for lane in lanes]
        self.asleep_at = memory.address + layout.asleep(reads)
        """Address of the flag that says that this end sleeps."""
        self._bell = bell
        self._find = atomics().find
        self._written = Addresses([reader.written_at for reader in self.readers])
        self._read = Addresses([reader.read_at for reader in self.readers])
        self._turn = 0
        self._open: Reader | None = None

    def fileno(self) -> int:
        """What a poller watches: readable when the peer rings, and when it has gone."""
        return self._bell.fileno()

    def publish(self, lane: int) -> None:
        """Let the peer see what was reserved in a lane's ring, and wake it if it sleeps."""
        if self.writers[lane].publish():
            try:
                self._bell.send(RING, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except BlockingIOError:
                pass  # so many wait that the peer will find one
            except OSError:
                self.is_lost = True

    def hear(self) -> None:
        """Take the rings that have come: they have done their work by waking this process. Notices the peer's end."""
        try:
            while self._bell.recv(len(RING), socket.MSG_DONTWAIT):
                pass
        except BlockingIOError:
            return
        except OSError:  # it has died with something unread
            pass
        self.is_lost = True

    def receive(self) -> tuple[int, Record] | None:
        """Lane and record of a message, the lanes in turn; it stays in its ring until `release`."""
        lane = self._find(self._written.address, self._read.address, self._written.count, self._turn)
        if lane < 0:
            return None
        self._turn = (lane + 1) % len(self.readers)
        try:
            record = self.readers[lane].peek()
        except WireError as error:
            log.warning("%s writes nonsense into shared memory, and is left: %s", self.peer, error)
            self.is_lost = True
            return None
        if record is None:
            return None
        self._open = self.readers[lane]
        return lane, record

    def release(self) -> None:
        """Give the memory of the message received last back to the peer."""
        assert self._open is not None
        self._open.release()
        self._open = None

    def close(self) -> None:
        """Hang up. The memory goes when nothing refers to it any more."""
        self._bell.close()
