"""A clock from a few measured lane-steps: decode steps at other batches and contexts are laid on straight lines.

=========  ===========================================================================
compute    over rows, between the measured points and on from the last two of them
the rest   the same: links, queues, and the gaps between steps of a lane
attention  the same where there is little to read, and a line over what is read beyond
=========  ===========================================================================
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

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

    short: tuple[Sample, ...]
    """Of several numbers of rows, all with the same little to read."""
    long: Sample
    """With much to read."""

    def step_time(self, work: Work) -> StepTime:
        """Seconds of compute, attention and the rest."""
        rows = work.answered_rows
        if not rows:
            return StepTime(0.0, {}, 0.0)
        compute_s, attention_s, rest_s = self.parts(rows, sum(work.tokens_read.values()))
        return StepTime(compute_s, dict.fromkeys(work.tokens_read, attention_s), rest_s)

    def parts(self, rows: float, tokens: float) -> Parts:
        """The same of so many rows, which read so many tokens of one group."""
        compute_s, attention_s, rest_s = self._short_parts(rows)
        further = tokens - self._short_tokens(rows)
        return Parts(compute_s, attention_s + further * self._s_per_token, rest_s)

    @property
    def _s_per_token(self) -> float:
        """Of reading."""
        rows = self.long.rows
        tokens = self.long.tokens - self._short_tokens(rows)
        seconds = self.long.parts.attention_s - self._short_parts(rows).attention_s
        return max(0.0, seconds / tokens) if tokens > 0 else 0.0

    def _short_parts(self, rows: float) -> Parts:
        points = [(each.rows, each.parts) for each in self.short]
        return Parts(*(_between([(x, parts[part]) for x, parts in points], rows) for part in range(len(Parts._fields))))

    def _short_tokens(self, rows: float) -> float:
        first = self.short[0]
        return rows * first.tokens / first.rows


@dataclass(frozen=True)
class Prediction:
    """What a stack will do when many requests of one kind come at once."""

    batch: int
    """Requests that run at once, none of which is preempted."""
    tokens_per_s: float
    """While so many decode."""


def predict(clock: MeasuredClock, setup: Setup, requests: int, prompt: int, output: int) -> Prediction:
    """Let the scheduler say how many of so many requests run at once to their end, and the clock how fast they do."""
    asked = TraceRequest(0.0, prompt, output)
    batch = simulate([asked] * requests, setup, clock).peak_running
    while (alone := simulate([asked] * batch, setup, clock)).preemptions:
        batch -= 1  # begun at once, but there were no blocks for all of their tokens
    return Prediction(batch, batch / alone.tpot_s.mean)


def _between(points: Sequence[tuple[float, float]], x: float) -> float:
    """On the lines through rising points, of which the outer ones go on; never below zero."""
    if len(points) == 1:
        return points[0][1]
    lines = list(pairwise(points))
    (x0, y0), (x1, y1) = next((line for line in lines if x <= line[1][0]), lines[-1])
    return max(0.0, y0 + (y1 - y0) * (x - x0) / (x1 - x0))
