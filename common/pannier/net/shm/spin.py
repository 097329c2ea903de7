"""How long to look for a message before going to sleep: waking costs more than a short wait, if a core is free."""

import os
import time
from pathlib import Path

SPIN_US = 50
"""About what it costs to be woken."""
SAMPLE_S = 0.2
MEMORY_S = 1.0
"""How far back the average of samples looks."""
SLACK = 0.5
"""Threads above the number of cores that are no scarcity yet: others that run for a moment now and then."""


class Spin:
    """The budget, which is none while cores are scarce: who spins then keeps its own peer from running."""

    def __init__(self, spin_us: int = SPIN_US, load: Path = Path("/proc/loadavg"), cores: int | None = None) -> None:
        self._spin_ns = spin_us * 1000
        self._load = load
        self._cores = len(os.sched_getaffinity(0)) if cores is None else cores
        self._running = 0.0
        """Threads of the host that could run, lately."""
        self._sampled = float("-inf")

    def budget_ns(self, processes: int) -> int:
        """Nanoseconds, where so many processes may spin at once, this one included."""
        if not self._spin_ns:
            return 0
        now = time.monotonic()
        if now - self._sampled > SAMPLE_S:
            self._sample(now)
        return self._spin_ns if max(processes, self._running - SLACK) <= self._cores else 0

    def _sample(self, now: float) -> None:
        try:
            running = int(self._load.read_text().split()[3].partition("/")[0])
        except (OSError, ValueError, IndexError):
            running = 0  # nothing is known of others
        weight = min(1.0, (now - self._sampled) / MEMORY_S)
        self._running += weight * (running - self._running)
        self._sampled = now
