"""How fast an emulated attention device is: every call is stretched by waiting, its result stays what it is."""

import time
from dataclasses import dataclass

from pannier.runtime.config import AttentionConfig, ComputeConfig


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
    def of(cls, config: AttentionConfig | ComputeConfig) -> "Pace | None":
        """What is configured; None: the device's own."""
        pace = cls(config.emulate_rate, *(config.emulate_attention or ()))
        return None if pace == cls() else pace

    def stretch(self, seconds: float, rows: int, calls: int) -> float:
        """A call of so many rows, one of so many of the model, has just taken `seconds`; what it takes now."""
        least = (self.step_ms / 1e3 + rows * self.row_us / 1e6) / calls
        goal = max(seconds / self.rate, least)
        if goal > seconds:
            time.sleep(goal - seconds)
        return goal

    def __str__(self) -> str:
        parts = [f"{self.rate:g} times as fast"] * (self.rate != 1)
        if self.step_ms or self.row_us:
            parts.append(f"at least {self.step_ms:g} ms" + f" and {self.row_us:g} us a row" * bool(self.row_us))
        return " and ".join(parts)
