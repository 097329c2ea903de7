"""This process's ends of the links that `pannier bench link` measures: the real ones, and plain TCP beside."""

import socket
import time
from collections import deque
from typing import Protocol

import torch

from pannier.cli.link_cases import HEADER_BYTES, Case, Plan, read_exactly
from pannier.compute.link import Link
from pannier.compute.share import PIECE_CREDITS
from pannier.net.shm import Waiting
from pannier.wire import AttentionToCompute
from pannier.wire import messages as m

RETRY_MS = 2
FRAME = (1, 1, 1, 0, 0)
"""Life, session, step, lane and call: any will do."""


class End(Protocol):
    """One way to the other process."""

    def round_trips(self, case: Case, count: int) -> list[float]:
        """Seconds of each exchange."""

    def one_way(self, case: Case, count: int) -> float:
        """Seconds until so many messages of the case's size are there, and that is known."""


class LinkEnd:
    """A compute worker's link, used as a step uses it."""

    def __init__(self, link: Link, waiting: Waiting) -> None:
        self._link = link
        self._waiting = waiting

    def round_trips(self, case: Case, count: int) -> list[float]:
        """Requests, each sent when the answer before it is there."""
        request = m.Piece(*FRAME, 0, True, 1, ())
        tensors = [
            torch.zeros(1, 1, size // 2, dtype=torch.bfloat16) for size in (case.queries, case.keys, case.values)
        ]
        times = []
        for _ in range(count):
            started = time.perf_counter()
            self._link.send(request, tensors)
            self._wait()
            times.append(time.perf_counter() - started)
        return times

    def one_way(self, case: Case, count: int) -> float:
        """One-way pieces, as many under way as there are credits."""
        piece = m.Piece(*FRAME, 0, False, 0, ())
        half = torch.zeros(1, 1, case.size // 4, dtype=torch.bfloat16)
        started = time.perf_counter()
        under_way: deque[int] = deque()
        for number in range(count):
            if len(under_way) == PIECE_CREDITS:
                self._wait()
                under_way.popleft()
            self._link.send(piece, [half, half])
            under_way.append(number)
        for _ in under_way:
            self._wait()
        return time.perf_counter() - started

    def _wait(self) -> AttentionToCompute:
        while True:
            received = self._link.receive()
            if received is not None:
                return received[0]
            self._waiting.wait(None if self._link.flush() else RETRY_MS)


class PlainEnd:
    """Blocking TCP, as fast as the system is."""

    def __init__(self, port: int) -> None:
        self._connection = socket.create_connection(("127.0.0.1", port))
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def round_trips(self, case: Case, count: int) -> list[float]:
        """Messages, each sent when the echo of the one before is there."""
        Plan(case.size, count, is_echoed=True).write(self._connection)
        sent, buffer = bytes(HEADER_BYTES + case.size), memoryview(bytearray(HEADER_BYTES + case.size))
        times = []
        for _ in range(count):
            started = time.perf_counter()
            self._connection.sendall(sent)
            read_exactly(self._connection, buffer)
            times.append(time.perf_counter() - started)
        read_exactly(self._connection, buffer[:1])
        return times

    def one_way(self, case: Case, count: int) -> float:
        """Messages one after the other, and a byte back for all."""
        Plan(case.size, count, is_echoed=False).write(self._connection)
        sent = bytes(HEADER_BYTES + case.size)
        started = time.perf_counter()
        for _ in range(count):
            self._connection.sendall(sent)
        read_exactly(self._connection, memoryview(bytearray(1)))
        return time.perf_counter() - started

    def close(self) -> None:
        """Hang up."""
        self._connection.close()
