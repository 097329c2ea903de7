"""A plan in a file, for a simulation to run on: the same devices, rates and limits."""

from math import inf
from pathlib import Path

import msgspec

from pannier.planner.cost import ModelCost, Rates, Roofline
from pannier.planner.figures import Figures
from pannier.planner.offloaded import Offloaded
from pannier.planner.setup import Setup
from pannier.runtime.errors import ConfigError

UNKNOWN_FLOPS = 1e30
"""What isn't known is taken for no bound, as in the plan."""


class SavedPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a simulation needs of a plan."""

    name: str
    model: ModelCost
    rates: Rates
    blocks: tuple[int, ...]
    """Of each group."""
    replicas: int
    lanes: int
    block_size: int
    max_batch_tokens: int
    max_sequences: int

    @classmethod
    def of(cls, name: str, layout: Offloaded, figures: Figures) -> "SavedPlan":
        """Of a plan's best division. A replica of several stages becomes one device that is as many times as fast."""
        device, rows = layout.compute.device, figures.step.rows
        slowest = min(layout.placed, key=lambda each: each.bandwidth)
        tensors = figures.step.sent_bytes + figures.step.returned_bytes
        trips_s = len(layout.model.calls) * layout.wire.round_trip_s
        seconds = figures.step.parts.transfer_s - trips_s
        return cls(
            name=name,
            model=layout.model.cost(rows, layout.mix.context),
            rates=Rates(
                compute_flops=layout.stages * device.flops if device.flops else UNKNOWN_FLOPS,
                compute_bandwidth=layout.stages * device.weight_bandwidth,
                attention_flops=min(slowest.flops, UNKNOWN_FLOPS),
                attention_bandwidth=slowest.bandwidth,
                link_bandwidth=tensors / seconds if seconds > 0 else UNKNOWN_FLOPS,
                round_trip_s=layout.wire.round_trip_s,
            ),
            blocks=tuple(group.num_blocks for group in layout.groups),
            replicas=layout.replicas,
            lanes=layout.lanes,
            block_size=layout.block_size,
            # A step of the scheduler has room for all sequences, should they all be in one lane.
            max_batch_tokens=max(layout.chunk, figures.sequences),
            max_sequences=figures.sequences,
        )

    @property
    def clock(self) -> Roofline:
        """How long steps take."""
        return Roofline(self.model, self.rates)

    def setup(self) -> Setup:
        """The devices, with the queue unlimited and everybody patient."""
        return Setup(
            groups=self.blocks,
            replicas=self.replicas,
            lanes=self.lanes,
            block_size=self.block_size,
            max_batch_tokens=self.max_batch_tokens,
            max_sequences=self.max_sequences,
            patience_s=inf,
        )


def read_plan(path: Path) -> SavedPlan:
    """A file of `pannier plan --save`. Raises `ConfigError`."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=SavedPlan)
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is no plan of pannier plan --save: {error}") from error


def write_plan(path: Path, plan: SavedPlan) -> None:
    """Into a file that `read_plan` reads."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(plan), indent=1) + b"\n")
