"""Every division of two kinds of instances into pools, and which of them to take."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from math import inf
from typing import TypeVar

from pannier.planner.devices import Kind
from pannier.planner.figures import NO_GOAL, Figures, Goal
from pannier.planner.homogeneous import Homogeneous
from pannier.planner.mix import Mix
from pannier.planner.offloaded import NETWORK, Offloaded, Wire
from pannier.planner.sizes import ModelSizes
from pannier.scheduler.placement import PlacementError

T = TypeVar("T")
COUNTS = (1, 2, 3, 4, 6, 8, 12, 16)
"""Instances of a pool that are tried."""
TOGETHER = (1, 2, 4, 8, 16)
"""Devices that share the weights: the homogeneous engine's, and stages."""


@dataclass(frozen=True)
class Found:
    """One division, and what it gives."""

    layout: Offloaded
    figures: Figures


@dataclass(frozen=True, kw_only=True)
class Question:
    """What a plan is asked."""

    model: ModelSizes
    mix: Mix
    goal: Goal = NO_GOAL
    objective: str = "cost"
    """cost: the least dollars per token; throughput: the most tokens within the budget."""
    budget: float = inf
    """Dollars an hour."""
    wire: Wire = NETWORK
    has_prefill: bool = True
    chunk: int = 2048
    block_size: int = 64
    compute_counts: tuple[int, ...] = COUNTS
    attention_counts: tuple[int, ...] = COUNTS

    def better(self, one: Figures, other: Figures) -> bool:
        """Whether one figure is to be preferred; of equal ones the cheaper, then the one with fewer devices."""
        return self._rank(one) < self._rank(other)

    def _rank(self, figures: Figures) -> tuple[float, float, int]:
        if self.objective == "cost":
            return figures.usd_per_mtok, figures.usd_per_hour, figures.devices
        return -figures.tokens_per_s, figures.usd_per_hour, figures.devices


@dataclass(frozen=True)
class Answer:
    """The best of both engines; None where there is none at all."""

    offloaded: Found | None
    homogeneous: tuple[Homogeneous, Figures] | None
    alone: Figures | None = None
    """The best homogeneous engine of the compute pool's kind only: what would be there without the attention pool."""
    tried: tuple[Found, ...] = ()
    rivals: tuple[Figures, ...] = ()
    refused: dict[str, int] = field(default_factory=dict)
    """What forbade other divisions -> how many."""


def divisions(question: Question, compute: Kind, attention: Kind) -> Iterator[Offloaded]:
    """All that the budget allows, each with every number of stages that divides its compute devices."""
    for rented in question.compute_counts:
        for beside in question.attention_counts:
            devices = rented * compute.devices
            if rented * compute.usd_per_hour + beside * attention.usd_per_hour > question.budget:
                continue
            for stages in TOGETHER:
                if devices % stages == 0 and stages <= len(question.model.calls):
                    yield Offloaded(
                        model=question.model,
                        mix=question.mix,
                        compute=compute,
                        attention=attention,
                        compute_devices=devices,
                        attention_devices=beside * attention.devices,
                        stages=stages,
                        wire=question.wire,
                        has_prefill=question.has_prefill,
                        chunk=question.chunk,
                        block_size=question.block_size,
                    )


def search(question: Question, compute: Kind, attention: Kind, rivals: Iterable[Kind] | None = None) -> Answer:
    """The best division of these two kinds, and the best homogeneous engine of `rivals`: both kinds if not given."""
    tried, refused = [], dict[str, int]()
    for layout in divisions(question, compute, attention):
        try:
            figures = layout.figures(question.goal)
        except PlacementError:
            figures, why = None, "the attention workers can't hold a block of tokens"
        else:
            why = "a goal is not kept" if layout.has_room_for_weights else "the weights don't fit"
        if figures is None:
            refused[why] = refused.get(why, 0) + 1
        else:
            tried.append(Found(layout, figures))
    kinds = (compute, attention) if rivals is None else tuple(rivals)
    against = [each for kind in dict.fromkeys(kinds) for each in homogeneous(question, kind)]
    return Answer(
        offloaded=best_of(question, tried, lambda each: each.figures),
        homogeneous=best_of(question, against, lambda each: each[1]),
        alone=best_of(question, [figures for engine, figures in against if engine.kind == compute], lambda each: each),
        tried=tuple(tried),
        rivals=tuple(figures for _, figures in against),
        refused=refused,
    )


def homogeneous(question: Question, kind: Kind) -> Iterator[tuple[Homogeneous, Figures]]:
    """The engine on one kind only; for throughput as many replicas of it as the budget pays.

    None of a device whose arithmetic isn't known: it would win for that.
    """
    if kind.device.flops is None:
        return
    for devices in TOGETHER:
        if devices < kind.devices and kind.devices % devices:
            continue
        engine = Homogeneous(
            model=question.model,
            mix=question.mix,
            kind=kind,
            devices=devices,
            has_prefill=question.has_prefill,
            chunk=question.chunk,
            waste=question.block_size / 2,
        )
        if (figures := engine.figures(question.goal)) is None or figures.usd_per_hour > question.budget:
            continue
        times = int(question.budget // figures.usd_per_hour) if question.budget < inf else 1
        yield engine, _times(figures, times if question.objective == "throughput" else 1)


def _times(figures: Figures, replicas: int) -> Figures:
    return replace(
        figures,
        sequences=figures.sequences * replicas,
        tokens_per_s=figures.tokens_per_s * replicas,
        usd_per_hour=figures.usd_per_hour * replicas,
        devices=figures.devices * replicas,
    )


def best_of(question: Question, found: list[T], figures: Callable[[T], Figures]) -> T | None:
    """The one whose figures are to be preferred; None of none."""
    best: T | None = None
    for each in found:
        if best is None or question.better(figures(each), figures(best)):
            best = each
    return best
