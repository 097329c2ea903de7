"""What the query rows of a step mean: which blocks each of them looks at. Made once per step, used by every call."""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from pannier.ops.native import Library
from pannier.ops.paged_attention.cpu_plan import CpuGeometry, CpuPlan, make_cpu_plan
from pannier.ops.paged_attention.plan import Bucket, Geometry, make_plan
from pannier.ops.paged_attention.scratch import Scratch
from pannier.ops.paged_attention.segment import PagedSegment

Plan = TypeVar("Plan")


@dataclass(frozen=True)
class PagedBatch:
    """The segments of a step; the rows of a query tensor are theirs, in this order.

    What a form needs depends on the call's window and heads. It is planned at the first call of each kind and kept, as
    most models have one kind and none more than a few. Not for use by several threads at once.
    """

    segments: tuple[PagedSegment, ...]
    device: torch.device
    num_rows: int
    scratch: Scratch
    _plans: dict[Geometry, tuple[Bucket, ...]] = field(default_factory=dict, repr=False, compare=False)
    _cpu_plans: dict[CpuGeometry, CpuPlan] = field(default_factory=dict, repr=False, compare=False)
    _kept: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def build(
        cls, segments: Iterable[PagedSegment], device: torch.device | str, scratch: Scratch | None = None
    ) -> "PagedBatch":
        """The batch of these segments, for tensors on `device`.

        A thread that builds a batch for every step keeps one `scratch` for them; None makes one for this batch. Raises
        ValueError for a negative number.
        """
        listed = tuple(segments)
        for number, segment in enumerate(listed):
            segment.check(number)
        return cls(listed, torch.device(device), sum(segment.num_queries for segment in listed), scratch or Scratch())

    def plan(self, geometry: Geometry) -> tuple[Bucket, ...]:
        """The buckets to compute for a call of this geometry; rows in none of them see nothing."""
        buckets = self._plans.get(geometry)
        if buckets is None:
            buckets = make_plan(self.segments, geometry, self.device)
            self._plans[geometry] = buckets
        return buckets

    def cpu_plan(self, geometry: CpuGeometry, built: Library) -> CpuPlan:
        """The tables that a build of the C++ form needs for a call of this geometry."""
        plan = self._cpu_plans.get(geometry)
        if plan is None:
            plan = self._cpu_plans[geometry] = make_cpu_plan(self.segments, geometry, built)
        return plan

    def kept(self, kind: Hashable, make: Callable[[], Plan]) -> Plan:
        """What a form made for its calls of this kind; it is made at the first one."""
        if kind not in self._kept:
            self._kept[kind] = make()
        plan: Plan = self._kept[kind]
        return plan


__all__ = ["PagedBatch", "PagedSegment", "Scratch"]
