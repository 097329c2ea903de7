"""The sending half of a connection: what the system takes at once, and the rest when it takes more."""

import socket
from collections import deque
from collections.abc import Sequence
from itertools import islice

from pannier.net.errors import PeerGone
from pannier.wire import Buffer

CAPACITY = 1024
"""Pieces that may wait; a peer for which more pile up has stopped reading and is treated as gone."""
MOST_PIECES = 64
"""Given to the system in one call."""


class Writer:
    """Writes to a socket that doesn't block. Who gives a piece away leaves its bytes as they are from then on."""

    def __init__(self, connection: socket.socket) -> None:
        self.waiting: deque[memoryview] = deque()
        """What the system has not taken yet."""
        self._send = connection.sendmsg

    def send(self, pieces: Sequence[Buffer]) -> None:
        """Send, or keep until `flush`. Raises `PeerGone` when the peer has stopped reading, and `OSError`."""
        if self.waiting:
            if len(self.waiting) >= CAPACITY:
                raise PeerGone(f"a peer has not read {CAPACITY} pieces of messages in a row")
            self._keep(pieces, 0)
        elif (count := self._try(pieces)) < sum(map(len, pieces)):
            self._keep(pieces, count)

    def flush(self) -> bool:
        """Send what was kept as far as the system takes it; True if nothing is left. Raises `OSError`."""
        while self.waiting:
            count = self._try(list(islice(self.waiting, MOST_PIECES)))
            if not count:
                return False
            self._forget(count)
        return True

    def _try(self, pieces: Sequence[Buffer]) -> int:
        """How many bytes the system has taken."""
        try:
            return self._send(pieces)
        except BlockingIOError:
            return 0

    def _keep(self, pieces: Sequence[Buffer], count: int) -> None:
        """All but the first `count` bytes, and nothing empty: the system would never say that it has taken that."""
        for piece in pieces:
            if count < len(piece):
                self.waiting.append(memoryview(piece)[count:])
            count = max(0, count - len(piece))

    def _forget(self, count: int) -> None:
        """So many bytes are the system's now."""
        while count:
            first = self.waiting.popleft()
            if count < len(first):
                self.waiting.appendleft(first[count:])
                return
            count -= len(first)
