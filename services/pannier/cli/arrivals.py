"""When requests come: at a rate, as a trace says, or whenever another has ended."""

import random
from collections.abc import Iterable
from itertools import accumulate
from math import inf


def at_rate(requests: int, per_s: float, burstiness: float, seed: int) -> list[float]:
    """Seconds after the start at which each request comes.

    Gaps are drawn from a gamma distribution with this shape and a mean of 1 / `per_s`: 1 is a Poisson process, less is
    burstier, more is steadier. An infinite rate is all at once.
    """
    if per_s == inf:
        return [0.0] * requests
    draw = random.Random(seed)
    gaps = [draw.gammavariate(burstiness, 1 / (per_s * burstiness)) for _ in range(requests)]
    return list(accumulate([0.0, *gaps[1:]]))


def at_speed(arrivals: Iterable[float], speed: float) -> list[float]:
    """A trace's moments, that many times as fast."""
    return [moment / speed for moment in arrivals]
