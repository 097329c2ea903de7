"""A network as if it were slower: what is under way in it, until a slower one would have brought it."""

import heapq
import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from typing import Self

import torch

from pannier.runtime.alarm import Alarm
from pannier.runtime.config import AttentionConfig

GIGABIT = 1e9 / 8
Deliver = Callable[[], object]
"""What is done with a message once it has come."""


class EmulatedNetwork:
    """Wires, one for each peer and direction, on which messages follow each other.

    Each takes what its bytes do at the rate behind the one before it, and then the delay. Headers weigh nothing.
    Moments are of `time.perf_counter`.
    """

    def __init__(self, delay_ms: float = 0.0, gigabits: float | None = None) -> None:
        self._delay_ms = delay_ms
        self._gigabits = gigabits
        self._s_per_byte = 0.0 if gigabits is None else 1 / (gigabits * GIGABIT)
        self._free_at: dict[Hashable, float] = defaultdict(float)
        """By wire: when all that was put on it has left."""
        self._under_way: list[tuple[float, int, Deliver]] = []
        """A heap: what is due first, and of that what was sent first, is in front."""
        self._numbers = itertools.count()
        self._alarm = Alarm()

    @classmethod
    def of(cls, config: AttentionConfig) -> Self | None:
        """What is configured; None: the network as it is."""
        if not config.emulate_delay and config.emulate_bandwidth is None:
            return None
        return cls(config.emulate_delay, config.emulate_bandwidth)

    def fileno(self) -> int:
        """What a poller watches: readable once something has come of what was under way at the last `deliver`."""
        return self._alarm.fileno()

    def send(self, wire: Hashable, tensors: Iterable[torch.Tensor], deliver: Deliver, ready_at: float = 0.0) -> None:
        """Send a message off on a wire, not before it is ready; `deliver` is called once it has come."""
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        leaves_at = max(time.perf_counter(), ready_at, self._free_at[wire]) + num_bytes * self._s_per_byte
        self._free_at[wire] = leaves_at
        heapq.heappush(self._under_way, (leaves_at + self._delay_ms / 1e3, next(self._numbers), deliver))

    def deliver(self) -> None:
        """Deliver all that has come, in the order in which it did."""
        while self._under_way and self._under_way[0][0] <= time.perf_counter():
            _, _, deliver = heapq.heappop(self._under_way)
            deliver()
        self._alarm.set(self._under_way[0][0] if self._under_way else None)

    def close(self) -> None:
        """Drop what is under way."""
        self._under_way.clear()
        self._alarm.close()

    def __str__(self) -> str:
        rate = "" if self._gigabits is None else f", {self._gigabits:g} Gbit/s"
        return f"{self._delay_ms:g} ms each way{rate}"
