"""A link as if the network were slower: what is sent or arrives is held until a slower one would have brought it."""

import time
from collections import deque
from contextlib import suppress
from typing import Generic, TypeVar

import zmq

from pannier.compute.link import Link, Received, Tensors
from pannier.net.errors import PeerGone
from pannier.wire import ComputeToAttention

M = TypeVar("M")
GIGABIT = 1e9 / 8


class EmulatedLink:
    """Wraps a link. Each direction has its own rate; a message is held for what it takes at that rate, and the delay.

    The delay of an answer begins when the step thread sees it, so behind a slice that runs on the CPU it comes late.
    """

    def __init__(self, link: Link, delay_ms: float = 0.0, gigabits: float | None = None) -> None:
        self.name = link.name
        rate = "" if gigabits is None else f", {gigabits:g} Gbit/s"
        self.kind = f"{link.kind} (emulated: {delay_ms:g} ms each way{rate})"
        self.socket: zmq.Socket[bytes] | None = link.socket
        self._link = link
        self._leaving: _Wire[tuple[ComputeToAttention, Tensors]] = _Wire(delay_ms / 1e3, gigabits)
        self._arriving: _Wire[Received] = _Wire(delay_ms / 1e3, gigabits)

    @property
    def due(self) -> float | None:
        """When the next message is to go on, by `time.perf_counter`."""
        return min((wire.due for wire in (self._leaving, self._arriving) if wire.due is not None), default=None)

    def send(self, message: ComputeToAttention, tensors: Tensors) -> None:
        """Hold a message; it is sent by the first `flush` or `receive` that comes when it is due."""
        self._leaving.put((message, tensors), tensors)

    def receive(self) -> Received | None:
        """The next answer that is due. Raises `WireError`."""
        self._release()
        while (received := self._link.receive()) is not None:
            self._arriving.put(received, received[1])
        return self._arriving.take()

    def flush(self) -> bool:
        """Send what is due; True if only messages that are not due are left."""
        self._release()
        return self._link.flush()

    def close(self) -> None:
        """Close the link; what is held is dropped."""
        self._link.close()

    def _release(self) -> None:
        while (held := self._leaving.take()) is not None:
            with suppress(PeerGone):  # lost on the way; what becomes of the peer's group is the gateway's to say
                self._link.send(*held)


class _Wire(Generic[M]):
    """One direction: what is under way, in the order of its arrival."""

    def __init__(self, delay_s: float, gigabits: float | None) -> None:
        self._delay_s = delay_s
        self._s_per_byte = 0.0 if gigabits is None else 1 / (gigabits * GIGABIT)
        self._free_at = 0.0
        self._held: deque[tuple[float, M]] = deque()

    @property
    def due(self) -> float | None:
        """When the next one arrives."""
        return self._held[0][0] if self._held else None

    def put(self, item: M, tensors: Tensors) -> None:
        """Send off; it leaves behind what was put before. Headers weigh nothing."""
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        self._free_at = max(self._free_at, time.perf_counter()) + num_bytes * self._s_per_byte
        self._held.append((self._free_at + self._delay_s, item))

    def take(self) -> M | None:
        """What has arrived next, if anything has."""
        if not self._held or self._held[0][0] > time.perf_counter():
            return None
        return self._held.popleft()[1]
