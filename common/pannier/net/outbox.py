"""Messages that wait for a peer whose queue is full: bounded, non-blocking, in order."""

from collections import deque
from collections.abc import Callable, Sequence

import zmq

from pannier.net.errors import PeerGone
from pannier.wire import Buffer

Frames = Sequence[Buffer]

CAPACITY = 1024
"""Messages that may wait for one peer; who lets more pile up has stopped reading and is treated as gone."""


class Outbox:
    """The waiting messages of one peer. `send` is tried at once and never blocks."""

    def __init__(self, send: Callable[[Frames], object], capacity: int = CAPACITY) -> None:
        self._send = send
        self._capacity = capacity
        self._waiting: deque[Frames] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, frames: Frames, *, always: bool = False) -> None:
        """Send, or keep until `flush`. Raises `PeerGone` when the peer has left or stopped reading.

        What waits already is kept when it has stopped reading. With `always` the frames are kept as well: for messages
        of which no more come than were asked for.
        """
        if len(self._waiting) >= self._capacity and not always:
            raise PeerGone(f"a peer has not read {self._capacity} messages in a row")
        self._waiting.append(frames)
        self.flush()

    def flush(self) -> bool:
        """Send what the peer takes; True when nothing is left waiting. Raises `PeerGone`."""
        while self._waiting:
            try:
                self._send(self._waiting[0])
            except zmq.Again:
                return False
            except zmq.ZMQError as error:
                self._waiting.clear()
                raise PeerGone(f"a peer can't be reached: {error.strerror}") from error
            self._waiting.popleft()
        return True
