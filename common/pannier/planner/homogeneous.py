"""The engine to beat: everything on devices of one kind.

It is given the benefit of every doubt, so that offloading is never recommended for what a plan leaves out of its rival:
the devices of one instance share each step evenly and talk to each other for nothing (ideal tensor parallelism);
instances hold stages of the model, always have something to do, and pass it on for nothing (ideal pipelining).
"""

from dataclasses import dataclass
from functools import cached_property

from pannier.planner.devices import Kind
from pannier.planner.figures import NO_GOAL, NO_PROMPTS, Figures, Goal, Prompts, Step, most_sequences
from pannier.planner.mix import Mix
from pannier.planner.overlap import Bound, Parts
from pannier.planner.sizes import ModelSizes


@dataclass(frozen=True, kw_only=True)
class Homogeneous:
    """So many devices as one replica. Others beside it change neither its cost per token nor its latency."""

    model: ModelSizes
    mix: Mix
    kind: Kind
    devices: int
    has_prefill: bool = True
    chunk: int = 2048
    waste: float = 32.0
    """Tokens of the last block of a sequence that are empty, on average."""

    @property
    def at_once(self) -> int:
        """Devices that share a step: those of one instance."""
        return min(self.devices, self.kind.devices)

    @property
    def stages(self) -> int:
        """Instances that a step goes through, each with a batch of its own at a time."""
        return self.devices // self.at_once

    @cached_property
    def room(self) -> int:
        """Sequences whose K and V fit beside the weights."""
        free = self.devices * self.kind.device.memory_bytes - self.model.weight_bytes
        return int(free / (self.model.kv_bytes * (self.mix.context + self.waste)))

    def step(self, sequences: float) -> Step:
        """A step of each stage's batch: first the weights' part, then attention's, on the same devices."""
        stages = min(self.stages, max(1.0, sequences))  # with fewer sequences some stay empty
        rows = sequences / stages
        compute_s, held_by = self._compute(rows, with_chunk=False)
        attention_s = self._attention(rows)
        seconds = compute_s + attention_s
        held = "compute" if compute_s > attention_s else "attention"
        return Step(
            rows=rows,
            parts=Parts(compute_s, attention_s, 0.0),
            bound=Bound(seconds / stages, held),
            exposed_s=0.0,
            period_s=seconds,
            ttft_s=self._ttft(rows, attention_s) if self.has_prefill else None,
            compute_held_by=held_by,
        )

    def figures(self, goal: Goal = NO_GOAL) -> Figures | None:
        """With as many sequences as memory and goal allow; None if that is none."""
        sequences, held_by = most_sequences(self.room, goal, self.step)
        if not sequences:
            return None
        step = self.step(sequences)
        return Figures(
            engine="homogeneous",
            sequences=sequences,
            sequences_held_by=held_by,
            step=step,
            tokens_per_s=sequences / step.period_s,
            usd_per_hour=self.devices * self.kind.device.usd_per_hour,
            devices=self.devices,
        )

    def _prompts(self, rows: float) -> Prompts:
        return Prompts.of(self.mix, rows, self.chunk) if self.has_prefill else NO_PROMPTS

    def _compute(self, rows: float, *, with_chunk: bool) -> tuple[float, str]:
        prompts, device = self._prompts(rows), self.kind.device
        prompt_rows = min(self.mix.prompt, self.chunk) if with_chunk else prompts.rows
        flops = (rows + prompt_rows) * self.model.flops_per_row + prompts.pairs * self.model.flops_per_pair
        weights_s = self.model.read_bytes(rows + prompt_rows) / device.weight_bandwidth / self.at_once
        return max((weights_s, "weights"), (flops / device.flops / self.at_once if device.flops else 0.0, "arithmetic"))

    def _attention(self, rows: float) -> float:
        model, prompts = self.model, self._prompts(rows)
        read = rows * model.kv_read_bytes(self.mix.context) + prompts.past_tokens * model.kv_bytes
        return read / self.kind.device.kv_bandwidth / self.at_once

    def _ttft(self, rows: float, attention_s: float) -> float:
        """Of the chunks of a mean prompt, each in a step with everybody's decode rows."""
        chunks = max(1.0, self.mix.prompt / self.chunk)
        return chunks * (self._compute(rows, with_chunk=True)[0] + attention_s)
