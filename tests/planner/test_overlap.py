"""What a lane-step can't be shorter than."""

import pytest

from pannier.planner.overlap import Bound, Parts, lane_step_bound, paying_transfer


@pytest.mark.parametrize(
    ("parts", "lanes", "replicas", "seconds", "held_by"),
    [
        (Parts(40, 8, 40), 1, 1, 88, "round trip"),
        (Parts(40, 8, 40), 2, 1, 44, "round trip"),
        (Parts(40, 8, 4), 2, 1, 40, "compute"),
        (Parts(40, 50, 4), 2, 1, 50, "attention"),
        (Parts(40, 30, 4), 2, 2, 60, "attention"),
        (Parts(40, 8, 400), 4, 1, 112, "round trip"),
    ],
)
def test_bound(parts: Parts, lanes: int, replicas: int, seconds: float, held_by: str) -> None:
    assert lane_step_bound(parts, lanes, replicas) == Bound(seconds, held_by)


def test_the_transfer_that_pays() -> None:
    """With it the bound is the goal; where compute or attention alone take longer, no link helps."""
    parts = Parts(40, 8, 400)
    longest = paying_transfer(parts, 2, 50)
    assert longest == 52
    assert lane_step_bound(Parts(40, 8, longest), 2).seconds == 50
    assert paying_transfer(parts, 2, 39) is None
    assert paying_transfer(parts, 1, 45) is None
