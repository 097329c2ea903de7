"""How two processes of one host come to share memory: one knocks at the other's door, a unix socket without a file.

Who knocks has made the memory and hands it over with its first and only message; it may write at once. The door's name
is drawn at random, so whoever reaches it is on the host, and in the network namespace, for which the name was meant.
"""

import array
import os
import secrets
import select
import socket
import struct
from pathlib import Path

import msgspec

from pannier.net.shm import memory
from pannier.net.shm.channel import Channel
from pannier.net.shm.compiled import functions
from pannier.net.shm.errors import CannotShare
from pannier.net.shm.memory import Direction, Layout

MAX_GREETING = 4096
CREDENTIALS = struct.Struct("3i")
"""Process, user and group."""


class Greeting(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Who knocks, and what the memory that it brings looks like."""

    name: str
    layout: Layout


def boot_id() -> str:
    """What tells this host, since it started, from all others."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


class Door:
    """Where an attention worker is found by compute workers on its host. Nothing here blocks."""

    def __init__(self) -> None:
        """Raises `CannotShare` where the compiled part is missing."""
        functions()
        name = f"pannier-{secrets.token_hex(16)}"
        self.address = f"shm://{boot_id()}/{name}"
        self._listening = _socket()
        self._listening.bind(f"\0{name}")
        self._listening.listen(64)
        self._callers: dict[int, socket.socket] = {}
        """Who has knocked and not yet said who it is."""
        self._ready = select.epoll()
        self._ready.register(self._listening, select.EPOLLIN)

    def fileno(self) -> int:
        """Readable when `open` has something to do."""
        return self._ready.fileno()

    def open(self) -> Channel | None:
        """Let in the next who has knocked; None when nobody has. Raises `CannotShare` for who can't come in."""
        while ready := self._ready.poll(0, 1):
            number, _ = ready[0]
            if number == self._listening.fileno():
                self._accept()
                continue
            self._ready.unregister(number)
            caller = self._callers.pop(number)
            try:
                return _take_in(caller)
            except BaseException:
                caller.close()
                raise
        return None

    def close(self) -> None:
        """Let in nobody any more."""
        self._ready.close()
        for listening in (self._listening, *self._callers.values()):
            listening.close()

    def _accept(self) -> None:
        try:
            caller, _ = self._listening.accept()
        except BlockingIOError:  # has gone again
            return
        self._callers[caller.fileno()] = caller
        self._ready.register(caller, select.EPOLLIN)


def _take_in(knocking: socket.socket) -> Channel:
    _check_user(knocking)
    body, files = _receive(knocking)
    try:
        greeting = msgspec.msgpack.decode(body, type=Greeting)
        if len(files) != 1:
            raise CannotShare(f"{greeting.name} brings {len(files)} files instead of one")
        taken = memory.take(files[0], greeting.layout)
    except msgspec.MsgspecError as error:
        raise CannotShare(f"not a greeting: {error}") from error
    finally:
        for file in files:
            os.close(file)
    return Channel(taken, Direction.TO_COMPUTE, knocking, greeting.name)


def _receive(knocking: socket.socket) -> tuple[bytes, list[int]]:
    files = array.array("i")
    try:
        body, ancillary, _, _ = knocking.recvmsg(
            MAX_GREETING, socket.CMSG_SPACE(files.itemsize), socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
        )
    except OSError as error:
        raise CannotShare(f"somebody knocked and left: {error.strerror}") from error
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            files.frombytes(data[: len(data) - len(data) % files.itemsize])
    return body, files.tolist()


def knock(door: str, name: str, peer: str, layout: Layout) -> Channel:
    """The compute worker's end of a new channel to who is behind `door`. Raises `CannotShare` with the reason."""
    functions()
    host, _, place = door.removeprefix("shm://").partition("/")
    if host != boot_id():
        raise CannotShare(f"{peer} is on another host")
    dialling = _socket()
    try:
        dialling.connect(f"\0{place}")
        _check_user(dialling)
        made, file = memory.make(layout)
        try:
            socket.send_fds(dialling, [msgspec.msgpack.encode(Greeting(name, layout))], [file])
        finally:
            os.close(file)
    except CannotShare:
        dialling.close()
        raise
    except OSError as error:
        dialling.close()
        raise CannotShare(f"{peer} can't be reached within this host (in another container?): {error}") from error
    return Channel(made, Direction.TO_ATTENTION, dialling, peer)


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)


def _check_user(peer: socket.socket) -> None:
    _, user, _ = CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
    if user != os.geteuid():
        raise CannotShare(f"a process of user {user} and one of user {os.geteuid()} share no memory")
