"""What stands between a compute worker and an attention worker, and can cut them off from each other alone."""

import selectors
import socket
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import msgspec

from pannier.attention.service import AttentionService
from pannier.runtime.config import AttentionConfig
from pannier.runtime.service import run_service
from pannier.runtime.worker_service import DataContext, Facts, Worker

Fact = Literal["door", "tcp", "endpoint"]
"""Where an attention worker says that it is reached: through shared memory, over plain TCP, over ZeroMQ."""
SIZE = 1 << 20
RESET = struct.pack("ii", 1, 0)
"""Hang up without a word, as a firewall does."""


class Relay(threading.Thread):
    """Passes on, as a context, what comes at `place`, also files, to the address that is written in the file `real`."""

    def __init__(self, fact: Fact, real: Path) -> None:
        super().__init__(daemon=True)
        self.fact, self.real = fact, real
        self.num_connections = 0
        if fact == "door":
            self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._listening.bind(f"\0{real}")
            self._listening.listen()
        else:
            self._listening = socket.create_server(("127.0.0.1", 0))
        self.place = str(real) if fact == "door" else "{}:{}".format(*self._listening.getsockname())
        self._ready = selectors.DefaultSelector()
        self._ready.register(self._listening, selectors.EVENT_READ)
        self._rope, self._bell = socket.socketpair()
        self._ready.register(self._bell, selectors.EVENT_READ)
        self._has_cut = threading.Event()
        self._ends = False

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends = True
        self.cut()
        self.join()
        for each in (self._listening, self._rope, self._bell):
            each.close()
        self._ready.close()

    def cut(self) -> None:
        """Reset every connection there is now."""
        self._has_cut.clear()
        self._rope.send(b"x")
        assert self._has_cut.wait(10)

    def run(self) -> None:
        """Pass on what comes."""
        while not self._ends:
            for key, _ in self._ready.select():
                if key.fileobj is self._bell:
                    self._bell.recv(1)
                    self._reset()
                    break
                if key.fileobj is self._listening:
                    self._take_call()
                elif not self._pass_on(key.fileobj, key.data):
                    self._hang_up(key.fileobj, key.data)
                    break

    def _take_call(self) -> None:
        caller, _ = self._listening.accept()
        address = self.real.read_text().partition("://")[2]
        if self.fact == "door":
            called = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            called.connect("\0" + address.partition("/")[2])
        else:
            host, _, port = address.partition("/")[0].rpartition(":")
            called = socket.create_connection((host, int(port)))
            for end in (caller, called):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._ready.register(caller, selectors.EVENT_READ, called)
        self._ready.register(called, selectors.EVENT_READ, caller)
        self.num_connections += 1

    def _pass_on(self, source: Any, target: Any) -> bool:
        try:
            if self.fact == "door":
                body, files, _, _ = socket.recv_fds(source, SIZE, 1)
                socket.send_fds(target, [body], files)
                for file in files:
                    socket.close(file)
            else:
                body = source.recv(SIZE)
                target.sendall(body)
        except OSError:
            return False
        return bool(body)

    def _hang_up(self, *ends: Any) -> None:
        for end in ends:
            self._ready.unregister(end)
            with suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            end.close()

    def _reset(self) -> None:
        apart = (self._listening, self._bell)
        self._hang_up(*[key.fileobj for key in list(self._ready.get_map().values()) if key.fileobj not in apart])
        self._has_cut.set()


@dataclass(frozen=True)
class ElsewhereService:
    """The role of an attention worker that says that it is reached at `place`; where it really is, it writes down."""

    fact: Fact
    place: str
    real: Path

    def __call__(self, config: AttentionConfig) -> int:
        return run_service(_Elsewhere(config, self))


class _Elsewhere(AttentionService):
    def __init__(self, config: AttentionConfig, where: ElsewhereService) -> None:
        super().__init__(config)
        self._where = where

    async def prepare(self, context: DataContext) -> tuple[Worker, Facts]:
        """As the attention worker that it is; and say another address."""
        worker, facts = await super().prepare(context)
        where = self._where
        address: str = getattr(facts.attention, where.fact)
        where.real.write_text(address)
        scheme, _, rest = address.partition("://")
        before, slash, behind = rest.partition("/")
        moved = f"{before}/{where.place}" if where.fact == "door" else where.place + slash + behind
        assert facts.attention is not None
        attention = msgspec.structs.replace(facts.attention, **{where.fact: f"{scheme}://{moved}"})
        return worker, Facts(attention=attention)
