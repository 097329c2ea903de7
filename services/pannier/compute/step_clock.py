"""Where the time of one lane-step goes: compute, attention, transfer, and what of these nothing else hid.

All moments are seconds of `time.perf_counter`, which processes of one host share.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from pannier.wire import messages as m


class Span(NamedTuple):
    """What one lane did, or waited for, from `start` to `end`."""

    kind: str
    """compute, attention or transfer."""
    lane: int
    step: int
    call: int
    """The attention call; of compute the one that its slice leads to. One more than the last is the step's end."""
    start: float
    end: float


class StepClock:
    """The sums of one lane-step, and its spans for whoever records them."""

    def __init__(self, lane: int, step: int, started: float, record: Callable[[Span], None] | None = None) -> None:
        self._lane, self._step, self._call = lane, step, 0
        self._started = started
        self._record = record
        self._compute_s = self._attention_s = self._transfer_s = 0.0
        self._exposed_attention_s = self._exposed_transfer_s = 0.0
        self._waits_since: float | None = None
        self._idle: list[tuple[float, float]] = []

    def begun(self, now: float) -> None:
        """What the step starts from is there, of a stage that has waited for the one before it."""
        self._started = now
        self._idle.clear()

    def computed(self, start: float, end: float) -> None:
        """The device worked for this lane, which may wait for something from then on."""
        self._compute_s += end - start
        if self._waits_since is None:
            self._waits_since = end
        self._note("compute", start, end)

    def attended(self, seconds: float) -> None:
        """Of what counts as computed, so much was attention in this very process."""
        self._compute_s -= seconds
        self._attention_s += seconds

    def idled(self, start: float, end: float) -> None:
        """No lane could go on; what this one waited for is known when it comes."""
        self._idle.append((start, end))

    def waited(self, end: float, attention_s: float = 0.0) -> None:
        """What the lane waited for was seen at `end`; attention says how long it took.

        The rest is transfer: the link, and the queues on both sides of it. Half of it is taken to lie before attention
        and half behind, which decides what of the idle time counts for which.
        """
        start = end if self._waits_since is None else min(self._waits_since, end)
        self._waits_since = None
        each_way = max(0.0, end - start - attention_s) / 2
        begin, done = start + each_way, end - each_way
        self._attention_s += attention_s
        self._transfer_s += 2 * each_way
        exposed = _common(self._idle, begin, done)
        self._exposed_attention_s += exposed
        self._exposed_transfer_s += _common(self._idle, start, end) - exposed
        self._idle.clear()
        for kind, *moments in (("transfer", start, begin), ("attention", begin, done), ("transfer", done, end)):
            self._note(kind, *moments)
        self._call += 1

    def times(self, now: float) -> m.StepTimes:
        """The sums, when the step is done."""
        return m.StepTimes(
            compute_s=self._compute_s,
            attention_s=self._attention_s,
            transfer_s=self._transfer_s,
            exposed_attention_s=self._exposed_attention_s,
            exposed_transfer_s=self._exposed_transfer_s,
            total_s=now - self._started,
        )

    def _note(self, kind: str, start: float, end: float) -> None:
        if self._record is not None and end > start:
            self._record(Span(kind, self._lane, self._step, self._call, start, end))


def _common(intervals: Iterable[tuple[float, float]], start: float, end: float) -> float:
    """Seconds of the intervals that lie between `start` and `end`."""
    return sum(max(0.0, min(end, stop) - max(start, begin)) for begin, stop in intervals)
