"""One end of a connection over plain TCP: frames in both directions, and the peer's end noticed at once.

The system tells when the peer's process has ended, whatever it died of. When its host or the network is silent it is
asked (keepalive), and what it doesn't acknowledge in time ends the connection too.
"""

import socket
from collections.abc import Sequence
from contextlib import suppress

from pannier.net.errors import PeerGone
from pannier.net.sockets import SocketOptions
from pannier.net.tcp.reader import Allocate, Reader, Record
from pannier.net.tcp.writer import Writer
from pannier.wire import Buffer, WireError

PROBES = 4
"""Within the silence that is borne."""
DIALS = 3
"""Times that dialling is repeated while nobody answers: for about 15 s altogether."""
PACING = b"bbr"
UNPACED = (b"cubic", b"reno")


class Stream:
    """A connection that is there, or about to be. Nothing here blocks.

    Attributes:
        peer: who is at the other end.
        largest: bytes of the largest frame that may be sent.
        is_lost: the connection has ended, for the `reason` given.
    """

    def __init__(
        self,
        connection: socket.socket,
        peer: str,
        limit: int,
        largest: int,
        allocate: Allocate,
        options: SocketOptions = SocketOptions(),
    ) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if options.buffer_bytes:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, options.buffer_bytes)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, options.buffer_bytes)
        _notice_silence(connection, options.silence_s)
        _send_without_pauses(connection)
        self.peer = peer
        self.largest = largest
        self.is_lost = False
        self.reason = ""
        self.reader = Reader(connection, limit, allocate)
        self.writer = Writer(connection)
        self._connection = connection

    def fileno(self) -> int:
        """What a poller watches: for what comes, and for room while the writer keeps something."""
        return self._connection.fileno()

    def is_local(self) -> bool:
        """Whether the peer is on this host, as far as its address tells."""
        try:
            return bool(self._connection.getsockname()[0] == self._connection.getpeername()[0])
        except OSError:  # not there yet, or no more
            return False

    def is_up(self) -> bool:
        """Whether the peer's host has answered."""
        try:
            self._connection.getpeername()
        except OSError:
            return False
        return not self.is_lost

    def send(self, pieces: Sequence[Buffer]) -> None:
        """Send a frame, or keep it until `flush`: its bytes are this end's until then.

        Raises `PeerGone` if the peer has left or stopped reading.
        """
        if self.is_lost:
            raise PeerGone(f"{self.peer} has gone: {self.reason}")
        try:
            self.writer.send(pieces)
        except OSError as error:
            self._lose(error)

    def flush(self) -> bool:
        """Send what was kept as far as the system takes it; True if nothing is left."""
        if not self.writer.waiting:
            return True
        try:
            return self.writer.flush()
        except OSError as error:
            self._lose(error)
            return True

    def notice(self) -> None:
        """A poller says that there is something to read, or that the connection has ended."""
        self.reader.notice()

    def receive(self) -> Record | None:
        """The next message; what is small stays in the reader's memory until the next call.

        Nonsense ends the connection, since nobody knows where the next frame begins.
        """
        if not self.reader.is_ready:
            return None
        try:
            return self.reader.receive()
        except (OSError, WireError) as error:
            self._lose(error)
            return None

    def close(self) -> None:
        """Hang up; what was kept is dropped."""
        self._lose(ConnectionError("hung up"))
        self._connection.close()

    def _lose(self, error: Exception) -> None:
        self.is_lost, self.reason = True, (isinstance(error, OSError) and error.strerror) or str(error)
        self.reader.is_ready = False
        self.writer.waiting.clear()


def _notice_silence(connection: socket.socket, silence_s: float) -> None:
    """End the connection when the peer's host acknowledges nothing for so long."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    pause_s = max(1, round(silence_s / (PROBES + 1)))
    for option, value in (
        (socket.TCP_KEEPIDLE, pause_s),
        (socket.TCP_KEEPINTVL, pause_s),
        (socket.TCP_KEEPCNT, PROBES),
        (socket.TCP_USER_TIMEOUT, round(silence_s * 1000)),
        (socket.TCP_SYNCNT, DIALS),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _send_without_pauses(connection: socket.socket) -> None:
    """Where the system paces what is sent, choose what doesn't.

    Its timers take more time than a message of 128 KB needs in all, and what they are for, queues of routers on long
    ways, isn't between these two.
    """
    with suppress(OSError):  # no such choice here
        if connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0") != PACING:
            return
    for unpaced in UNPACED:
        with suppress(OSError):  # missing, or not for everybody
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, unpaced)
            return
