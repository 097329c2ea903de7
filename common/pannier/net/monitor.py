"""What becomes of a socket's connections, as libzmq's monitor tells it."""

import contextlib
from typing import Any, NamedTuple

import zmq
from zmq.utils.monitor import recv_monitor_message

FAILED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL

TOLD = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_CONNECT_RETRIED


class News(NamedTuple):
    """What happened since the last look."""

    failed_handshakes: int
    refusal: str | None
    """Why a handshake failed for good."""
    lost: bool
    """A connection has ended."""
    greeted: bool
    """A handshake succeeded: there is a connection."""
    unanswered: bool
    """Nobody answered, or not in time; it is dialled again."""


class Monitor:
    """Given to `bind` or `connect`, which have it watch their socket. `socket` is readable when there are news."""

    socket: "zmq.Socket[bytes]"

    def watch(self, socket: "zmq.Socket[Any]", has_keys: bool) -> None:
        """Begin; called before there is any connection, since libzmq doesn't dial again after a refusal."""
        self._watched = socket
        self._has_keys = has_keys
        self.socket = socket.context.socket(zmq.PAIR, socket_class=zmq.Socket)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVHWM, 0)  # a full one would stop the I/O thread
        address = f"inproc://monitor-{self.socket.underlying}"
        socket.monitor(address, FAILED | TOLD)
        self.socket.connect(address)

    def news(self) -> News:
        """Everything that waits to be told."""
        failed, refusal, events = 0, None, 0
        with contextlib.suppress(zmq.Again):
            while True:
                told = recv_monitor_message(self.socket, zmq.NOBLOCK)
                events |= told["event"]
                failed += bool(told["event"] & FAILED)
                refusal = self._refusal(told["event"], told["value"]) or refusal
        lost, greeted, unanswered = (
            bool(events & event)
            for event in (zmq.EVENT_DISCONNECTED, zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_CONNECT_RETRIED)
        )
        return News(failed, refusal, lost, greeted, unanswered)

    def close(self) -> None:
        """End it, before its socket."""
        self._watched.disable_monitor()
        self.socket.close()

    def _refusal(self, event: int, value: int) -> str | None:
        """Why the peer will never talk to this end; None if it is not certain that it won't."""
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return "it doesn't know this key"
        if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            return (
                "it does not encrypt, and keys were given"
                if self._has_keys
                else "it asks for keys, and none were given"
            )
        return None
