"""A compute device that isn't there: slices become waits, and what they would give has shapes but no meaning.

Nothing is computed and no core is kept busy, so that any number of devices runs on one host. Tensors of the model's
real shapes still travel, and attention still attends to them.
"""

import time
from collections.abc import Generator
from typing import NamedTuple, Self

import torch

from pannier.runtime.config import ComputeConfig
from pannier.slicer import Attend, Call, SlicedModel
from pannier.slicer.export import POSITIONS
from pannier.slicer.model import Head, Values


class StepTime(NamedTuple):
    """How long the device takes for one lane-step: so much, and for every row so much more."""

    step_ms: float
    row_us: float = 0.0

    @classmethod
    def of(cls, config: ComputeConfig) -> Self | None:
        """What is configured; None: the device's own."""
        return None if config.emulate_compute is None else cls(*config.emulate_compute)

    def seconds(self, rows: int) -> float:
        """Of a lane-step with so many rows."""
        return self.step_ms / 1e3 + rows * self.row_us / 1e6

    def __str__(self) -> str:
        per_row = f" and {self.row_us:g} us a row" if self.row_us else ""
        return f"{self.step_ms:g} ms a step{per_row}"


class EmulatedDevice:
    """Runs one slice after the other, all slices of a step equally long. Moments are of `time.perf_counter`."""

    def __init__(self, step_time: StepTime, num_slices: int) -> None:
        self.busy_until = 0.0
        self._step_time = step_time
        self._num_slices = num_slices

    def launch(self, rows: int) -> tuple[float, float]:
        """Put one slice behind those under way; when it begins and ends."""
        start = max(self.busy_until, time.perf_counter())
        self.busy_until = start + self._step_time.seconds(rows) / self._num_slices
        return start, self.busy_until


class EmulatedModel(SlicedModel):
    """A model whose slices give zeros at once."""

    def __init__(self, model: SlicedModel) -> None:
        vars(self).update(vars(model))

    def run_stage(self, values: Values) -> Generator[Attend, torch.Tensor, None]:
        """Asks for attention as the model would."""
        positions: torch.Tensor = values[POSITIONS]
        for call in self.calls:
            sizes = ((call.q_heads, call.k_size), (call.kv_heads, call.k_size), (call.kv_heads, call.v_size))
            yield Attend(call, *(positions.new_zeros(len(positions), *size, dtype=self.dtype) for size in sizes))

    def head(self, values: Values) -> Head:
        """Gives logits of zero."""
        positions: torch.Tensor = values[POSITIONS]
        return lambda rows: positions.new_zeros(len(rows), self.vocab_size, dtype=self.dtype)

    def sinks(self, call: Call) -> torch.Tensor | None:  # noqa: ARG002  # as the model's
        """None: nothing is merged."""
        return None
