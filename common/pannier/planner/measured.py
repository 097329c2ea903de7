"""A clock from a few measured lane-steps: decode steps at other batches and contexts are laid on straight lines.

=========  ===========================================================================
compute    over rows, between the measured points and on from the last two of them
attention  over the stored tokens that are read: the line that fits best
the rest   over rows, as compute: links, queues, and the gaps between steps of a lane
=========  ===========================================================================
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from pannier.planner.cost import StepTime, Work
from pannier.planner.overlap import Parts
from pannier.planner.setup import Setup
from pannier.planner.simulate import simulate
from pannier.planner.trace import TraceRequest


@dataclass(frozen=True)
class Sample:
    """One kind of lane-step, as it was measured: of so many decode rows, which read so many stored tokens."""

    rows: float
    tokens: float
    parts: Parts
    """Transfer is all that is neither compute nor attention from one step of a lane to its next."""


@dataclass(frozen=True)
class MeasuredClock:
    """How long decode steps take; prompts take nothing, as where another pool computes them."""

    samples: tuple[Sample, ...]

    def step_time(self, work: Work) -> StepTime:
        """Seconds of compute, attention and the rest."""
        rows = work.answered_rows
        if not rows:
            return StepTime(0.0, {}, 0.0)
        base, slope = _line([(each.tokens, each.parts.attention_s) for each in self.samples])
        return StepTime(
            _between([(each.rows, each.parts.compute_s) for each in self.samples], rows),
            {group: base + slope * tokens for group, tokens in work.tokens_read.items()},
            _between([(each.rows, each.parts.transfer_s) for each in self.samples], rows),
        )


@dataclass(frozen=True)
class Prediction:
    """What a stack will do when many requests of one kind come at once."""

    batch: int
    """Requests that run at once."""
    tokens_per_s: float
    """While so many decode."""


def predict(clock: MeasuredClock, setup: Setup, requests: int, prompt: int, output: int) -> Prediction:
    """Let the scheduler say how many of so many requests run at once, and the clock how fast these decode."""
    asked = TraceRequest(0.0, prompt, output)
    batch = simulate([asked] * requests, setup, clock).peak_running
    alone = simulate([asked] * batch, setup, clock)
    return Prediction(batch, batch / alone.tpot_s.mean)


def _between(points: Sequence[tuple[float, float]], x: float) -> float:
    """On straight lines through the means of points, the outer lines going on; never below zero."""
    means = [(at, fmean(y for x, y in points if x == at)) for at in sorted({x for x, _ in points})]
    if len(means) == 1:
        return means[0][1]
    lines = list(pairwise(means))
    (x0, y0), (x1, y1) = next((line for line in lines if x <= line[1][0]), lines[-1])
    return max(0.0, y0 + (y1 - y0) * (x - x0) / (x1 - x0))


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Base and slope of the line of least squares, which doesn't fall."""
    mean_x, mean_y = fmean(x for x, _ in points), fmean(y for _, y in points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = max(0.0, sum((x - mean_x) * (y - mean_y) for x, y in points) / spread) if spread else 0.0
    return max(0.0, mean_y - slope * mean_x), slope
