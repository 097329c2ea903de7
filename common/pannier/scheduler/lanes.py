"""Lanes, and how sequences are spread over them: two lanes hide behind each other best when they take equally long.

A sequence weighs what its row costs the compute worker and what its tokens cost the attention workers.
"""

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from pannier.scheduler.sequence import Sequence
from pannier.scheduler.step import Planned

ROW_TOKENS = 256
"""Tokens of K and V that are read in about the time that one row takes in the slices."""


@dataclass(slots=True)
class Lane:
    """The sequences that run on one lane, and its planned steps from the oldest to the newest."""

    number: int
    sequences: dict[int, Sequence] = field(default_factory=dict)
    planned: deque[Planned] = field(default_factory=deque)
    load: int = 0
    """What its sequences weighed when that was last counted, and those that started since."""


def weight(sequence: Sequence) -> int:
    """What a sequence costs its lane, in tokens of K and V."""
    return sequence.width * (ROW_TOKENS + sequence.length)


def lightest(lanes: Iterable[Lane]) -> Lane:
    """Where a sequence should start."""
    return min(lanes, key=lambda lane: (lane.load, lane.number))


def count_loads(lanes: Collection[Lane]) -> None:
    """Weigh the sequences of each lane, those that are to change counted where they will be."""
    loads = dict.fromkeys((lane.number for lane in lanes), 0)
    for lane in lanes:
        for each in lane.sequences.values():
            loads[lane.number if each.next_lane is None else each.next_lane] += weight(each)
    for lane in lanes:
        lane.load = loads[lane.number]


def unbalanced(lanes: Collection[Lane]) -> tuple[Sequence, Lane] | None:
    """A change of one sequence to the lightest lane that evens two loads by a row's cost at least; None without one."""
    light = min(lanes, key=lambda lane: lane.load)
    for lane in sorted(lanes, key=lambda lane: -lane.load):  # the heaviest may have nothing that can be divided
        gap = lane.load - light.load
        if gap < ROW_TOKENS:
            return None
        movable = [each for each in lane.sequences.values() if each.next_lane is None]
        chosen = min(movable, key=lambda each: (abs(gap - 2 * weight(each)), -each.arrival), default=None)
        if chosen is not None and abs(gap - 2 * weight(chosen)) <= gap - ROW_TOKENS:
            return chosen, light
    return None
