"""Many values in a few numbers."""

from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil


@dataclass(frozen=True)
class Distribution:
    """Mean and percentiles of `count` values; a percentile is the smallest value that so many don't exceed."""

    count: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    largest: float = 0.0

    @classmethod
    def of(cls, values: "array[float]") -> "Distribution":
        """Of values one by one."""
        return cls._of_sorted(sorted(values), range(1, len(values) + 1), sum(values))

    @classmethod
    def of_counts(cls, counts: Mapping[int, int]) -> "Distribution":
        """Of values and how often each occurred."""
        values = sorted(counts)
        return cls._of_sorted(
            values, list(accumulate(counts[value] for value in values)), sum(v * n for v, n in counts.items())
        )

    @classmethod
    def _of_sorted(cls, values: Sequence[float], up_to: Sequence[int], total: float) -> "Distribution":
        """Of rising values, with how many there are up to each."""
        if not values:
            return cls()
        count = up_to[-1]
        p50, p90, p99 = (values[bisect_left(up_to, ceil(count * share / 100))] for share in (50, 90, 99))
        return cls(count, total / count, p50, p90, p99, values[-1])
