"""How short a lane-step can be when lanes overlap, what holds it there, and how short it must be to pay."""

from typing import NamedTuple


class Parts(NamedTuple):
    """Seconds of one lane-step when nothing else runs: T_m, T_a and T_c of DESIGN 6."""

    compute_s: float
    attention_s: float
    transfer_s: float


class Bound(NamedTuple):
    """No lane-step comes sooner behind the one before it, on one replica."""

    seconds: float
    held_by: str
    """compute, attention, link, or the round trip of a lane: the sum of all parts."""


def lane_step_bound(parts: Parts, lanes: float, replicas: int = 1, stages: int = 1, link_s: float = 0.0) -> Bound:
    """max(T_m / s, R T_a, link, (T_m + T_a + T_c) / lanes) for each of R replicas that share one attention pool.

    With one lane that is T_m + T_a + T_c. A replica of s stages has its T_m done by s devices, one lane on each.
    DESIGN 6 has no term for the link, since half of the sum covers it where both directions carry as much; `link_s` is
    what its busier direction carries in the time of one lane-step.
    """
    return max(
        Bound(sum(parts) / lanes, "round trip"),
        Bound(parts.compute_s / stages, "compute"),
        Bound(replicas * parts.attention_s, "attention"),
        Bound(link_s, "link"),
    )


def paying_transfer(parts: Parts, lanes: int, goal_s: float) -> float | None:
    """The longest transfer with which a lane-step's bound is at most `goal_s`; None: not even without any."""
    if max(parts.compute_s, parts.attention_s) > goal_s:
        return None
    left = lanes * goal_s - parts.compute_s - parts.attention_s
    return left if left >= 0 else None
