"""How fast an emulated attention device is: every call takes longer, its result stays what it is."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self, TypeAlias

from pannier.runtime.config import AttentionConfig, ComputeConfig

Stretch: TypeAlias = Callable[[float, int, int], float]
"""Told of a call: the seconds that it has just taken here, its rows, and how many calls the model has. Returns the
seconds that it takes on the emulated device."""


@dataclass(frozen=True)
class Pace:
    """A slower device. It must do all that the real one does, so it can't be made faster than that."""

    rate: float = 1.0
    """Its speed beside the real one's; 0.5 takes twice as long."""
    step_ms: float = 0.0
    """A lane-step's calls take at least so long together, all equally long,"""
    row_us: float = 0.0
    """and for every row so much longer."""

    @classmethod
    def of(cls, config: AttentionConfig | ComputeConfig) -> Self | None:
        """What is configured; None: the device's own."""
        pace = cls(config.emulate_rate, *(config.emulate_attention or ()))
        return None if pace == cls() else pace

    def seconds(self, taken: float, rows: int, calls: int) -> float:
        """Of a call with so many rows, one of so many of the model, that takes `taken` here."""
        least = (self.step_ms / 1e3 + rows * self.row_us / 1e6) / calls
        return max(taken / self.rate, least)

    def wait(self, taken: float, rows: int, calls: int) -> float:
        """The same once they are over: a `Stretch` for a thread that could do nothing else meanwhile."""
        seconds = self.seconds(taken, rows, calls)
        time.sleep(max(0.0, seconds - taken))
        return seconds

    def __str__(self) -> str:
        parts = [f"{self.rate:g} times as fast"] * (self.rate != 1)
        if self.step_ms or self.row_us:
            parts.append(f"at least {self.step_ms:g} ms" + f" and {self.row_us:g} us a row" * bool(self.row_us))
        return " and ".join(parts)


class PacedDevice:
    """Does one call after the other at its pace. Results are there at once, and are to be held until it has done them.

    So the thread that serves it is free for what else comes and goes. Moments are of `time.perf_counter`.
    """

    def __init__(self, pace: Pace) -> None:
        self.busy_until = 0.0
        self._pace = pace

    def launch(self, taken: float, rows: int, calls: int) -> float:
        """Put a call behind those under way: a `Stretch`."""
        seconds = self._pace.seconds(taken, rows, calls)
        self.busy_until = max(self.busy_until, time.perf_counter() - taken) + seconds
        return seconds
