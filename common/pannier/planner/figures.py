"""What a plan says of one engine on some devices."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from pannier.planner.mix import Mix
from pannier.planner.overlap import Bound, Parts


class Goal(NamedTuple):
    """What is to be kept: seconds, of a request that doesn't queue."""

    tpot_s: float = inf
    """Time per output token."""
    ttft_s: float = inf
    """Time to first token."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One lane-step, or of a homogeneous engine one step."""

    rows: float
    """Decode rows."""
    parts: Parts
    """Seconds when nothing else runs."""
    bound: Bound
    """Seconds from one to the next on one replica, and what holds them there."""
    exposed_s: float
    """Of these, those that neither compute nor attention fills."""
    period_s: float
    """From a sequence's token to its next."""
    ttft_s: float | None
    """None: prompts are computed elsewhere."""
    compute_held_by: str
    """weights or arithmetic."""
    sent_bytes: float = 0.0
    returned_bytes: float = 0.0
    """To attention and back."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """An engine with as many sequences as it can have."""

    engine: str
    sequences: int
    sequences_held_by: str
    """memory, or the goal that is kept."""
    step: Step
    tokens_per_s: float
    """Output tokens."""
    usd_per_hour: float
    devices: int

    @property
    def usd_per_mtok(self) -> float:
        """Dollars per million output tokens."""
        return self.usd_per_hour / 3600 / self.tokens_per_s * 1e6

    @property
    def tpot_s(self) -> float:
        """Seconds per output token of a sequence."""
        return self.step.period_s


NO_GOAL = Goal()


class Prompts(NamedTuple):
    """What the prompts ask for in the time in which a step gives one token to each of its rows."""

    begun: float
    """Prompts that begin: a sequence that ends is followed by another."""
    rows: float
    pairs: float
    """(query, key) pairs inside chunks, which are the compute device's."""
    past_rows: float
    """Rows of chunks that have a past, which is the attention workers'."""
    past_tokens: float
    """Stored tokens that these chunks read, once for all rows of a chunk."""
    past_pairs: float

    @classmethod
    def of(cls, mix: Mix, rows: float, chunk: int) -> "Prompts":
        """Of a mean prompt in chunks of so many rows, for so many decode rows."""
        begun, chunks = rows / mix.output, max(1.0, mix.prompt / chunk)
        size = mix.prompt / chunks
        past = size * chunks * (chunks - 1) / 2
        pairs = max(mix.chunk_pairs - past * size, 0.0) if chunks > 1 else mix.chunk_pairs
        return cls(
            begun, begun * mix.prompt, begun * pairs, begun * size * (chunks - 1), begun * past, begun * past * size
        )


NO_PROMPTS = Prompts(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def most_sequences(room: int, goal: Goal, step_of: Callable[[int], Step]) -> tuple[int, str]:
    """The most sequences, up to those that there is room for, that keep the goal; and what forbids more.

    A step never takes less time for more rows, so halving finds them. 0: not even one keeps it.
    """

    def broken(sequences: int) -> str:
        step = step_of(sequences)
        if step.period_s > goal.tpot_s:
            return "TPOT"
        return "TTFT" if step.ttft_s is not None and step.ttft_s > goal.ttft_s else ""

    if room < 1 or not (held := broken(room)):
        return max(room, 0), "memory"
    low, high = 0, room  # low keeps the goal, high doesn't
    while high - low > 1:
        middle = (low + high) // 2
        if why := broken(middle):
            high, held = middle, why
        else:
            low = middle
    return low, held
