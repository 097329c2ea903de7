"""Where compute workers come in over plain TCP: one dials, says who it is, and may send at once.

What it says carries a ticket, which is drawn at random as the listening process starts and published with its address,
over a channel that is encrypted if any is. So whoever comes in was sent there, and meant this very process.
"""

import secrets
import select
from collections.abc import Callable

import msgspec

from pannier.net.sockets import SocketOptions
from pannier.net.tcp.addresses import Address, connect, listen, parse
from pannier.net.tcp.errors import CannotTalk
from pannier.net.tcp.frame import write_head
from pannier.net.tcp.reader import Allocate, Record
from pannier.net.tcp.stream import Stream

MAX_HELLO = 1024
MAX_CALLERS = 64
"""Connections that have not said who they are; above that, who has been silent longest has to go."""


class Hello(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """The first message of a connection."""

    ticket: str
    name: str
    flow: int
    """Which of several connections of the same two processes."""
    largest: tuple[int, int]
    """Bytes of the largest frames: to the listening end, and back."""


class Listener:
    """Where compute workers dial. Nothing here blocks."""

    def __init__(self, endpoint: str, options: SocketOptions, memory: Callable[[], Allocate]) -> None:
        """Every connection's large frames are in `memory` of its own.

        Raises `PortBusy`, `Exposed`, `CannotTalk`, or `NetError` for an address that can't be bound.
        """
        self._options = options
        self._memory = memory
        self._ticket = secrets.token_hex(16)
        self._listening = listen(endpoint, options)
        self._listening.setblocking(False)
        host, port = self._listening.getsockname()[:2]
        self.address = str(Address(host, port, self._ticket))
        """With the real port and the ticket."""
        self._callers: dict[int, Stream] = {}
        """Who has not said who it is, longest first."""
        self._ready = select.epoll()
        self._ready.register(self._listening, select.EPOLLIN)

    def fileno(self) -> int:
        """Readable when `accept` has something to do."""
        return self._ready.fileno()

    def accept(self) -> tuple[Stream, Hello] | None:
        """The next who has dialled and said who it is; None when nobody has. Raises `CannotTalk` for who can't come in.

        What it has sent behind that may be there already.
        """
        while ready := self._ready.poll(0, 1):
            number, _ = ready[0]
            if number == self._listening.fileno():
                if not self._take_call():
                    return None
                continue
            caller = self._callers[number]
            caller.notice()
            first = caller.receive()
            if first is not None or caller.is_lost:
                self._forget(number)
                return caller, self._admit(caller, first)
        return None

    def close(self) -> None:
        """Let in nobody any more."""
        self._ready.close()
        self._listening.close()
        for caller in self._callers.values():
            caller.close()

    def _take_call(self) -> bool:
        """Whether one could be taken."""
        try:
            connection, _ = self._listening.accept()
        except OSError:  # has gone again, or there are too many files
            return False
        if len(self._callers) >= MAX_CALLERS:
            self._forget(next(iter(self._callers))).close()
        self._callers[connection.fileno()] = Stream(
            connection, "somebody", MAX_HELLO, MAX_HELLO, self._memory(), self._options
        )
        self._ready.register(connection, select.EPOLLIN)
        return True

    def _forget(self, number: int) -> Stream:
        self._ready.unregister(number)
        return self._callers.pop(number)

    def _admit(self, caller: Stream, first: Record | None) -> Hello:
        try:
            if first is None:
                raise CannotTalk(f"somebody dialled and did not say who it is: {caller.reason}")
            hello = self._read(first)
        except BaseException:
            caller.close()
            raise
        caller.peer = hello.name
        caller.reader.limit, caller.largest = hello.largest
        return hello

    def _read(self, first: Record) -> Hello:
        try:
            hello = msgspec.msgpack.decode(first.header, type=Hello)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise CannotTalk(f"somebody dialled and said nonsense: {error}") from error
        if not secrets.compare_digest(hello.ticket.encode(), self._ticket.encode()):
            raise CannotTalk(f"{hello.name} dialled with a ticket that is not this process's")
        most = self._options.max_bytes
        if any(not MAX_HELLO <= size <= most for size in hello.largest):
            raise CannotTalk(f"{hello.name} wants frames of {hello.largest} bytes; {MAX_HELLO} to {most} are possible")
        return hello


def dial(address: str, peer: str, hello: Hello, options: SocketOptions, allocate: Allocate) -> Stream:
    """A connection to who listens at `address`. It may be sent to at once: the system connects while others go on.

    The ticket of `hello` is that of the address. Raises `Exposed`, `CannotTalk`, or `NetError` if dialling is
    impossible; that nobody is there is noticed later.
    """
    where = parse(address)
    largest, limit = hello.largest
    stream = Stream(connect(where, options), peer, limit, largest, allocate, options)
    said = msgspec.msgpack.encode(msgspec.structs.replace(hello, ticket=where.ticket))
    stream.send([write_head(said, 0, largest)])
    return stream
