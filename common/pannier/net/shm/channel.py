"""One end of a same-host link: a ring for each lane and direction, and the unix socket over which it was agreed.

The socket carries no messages. It is the bell, rung with one byte when the peer sleeps, and its end is the peer's end,
which the system tells at once, whatever the peer died of.
"""

import logging
import socket

from pannier.net.shm.memory import Direction, Memory
from pannier.net.shm.ring import Readers, Record, Writer
from pannier.wire import WireError

RING = b"\0"
log = logging.getLogger(__name__)


class Channel:
    """The end that writes in one direction and reads in the other. Nothing here blocks."""

    def __init__(self, memory: Memory, writes: Direction, bell: socket.socket, peer: str) -> None:
        self.memory = memory
        self.peer = peer
        self.is_lost = False
        """The peer has gone, or was hung up on; what it wrote before can still be read."""
        layout, reads = memory.layout, Direction(1 - writes)
        lanes = range(layout.lanes)
        self.writers = [Writer(memory, layout.ring(writes, lane), layout.asleep(writes)) for lane in lanes]
        self.readers = Readers(memory, [layout.ring(reads, lane) for lane in lanes], layout.asleep(reads))
        self._bell = bell

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
        """Take a ring that has come: it has done its work by waking this process. Notices the peer's end."""
        try:
            if self._bell.recv(len(RING), socket.MSG_DONTWAIT):
                return
        except BlockingIOError:
            return
        except OSError:  # it has died with something unread
            pass
        self.is_lost = True

    def receive(self) -> Record | None:
        """A message, the lanes in turn; it stays in its ring until `release`."""
        try:
            return self.readers.receive()
        except WireError as error:
            log.warning("%s has to be left: %s", self.peer, error)
            self.is_lost = True
            return None

    def release(self) -> None:
        """Give the memory of the message received last back to the peer."""
        self.readers.release()

    def close(self) -> None:
        """Hang up. The memory goes when nothing refers to it any more."""
        self.is_lost = True
        self._bell.close()
