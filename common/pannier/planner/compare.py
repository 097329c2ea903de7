"""Two results side by side: how fast, how soon, what a token costs, and what conversions take of it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

SPEEDS = ("decode_tokens_per_s", "output_tokens_per_s", "tokens_per_s", "run_tokens_per_s", "total_tokens_per_s")
"""Metrics that are a throughput, the first that a result has."""
LATENCIES = ("tpot", "time_between_tokens", "ttft")
"""Metrics in ms."""
CONVERSIONS = "conversion_share"
"""Share of the time of decoding in which element types are converted."""


@dataclass(frozen=True)
class Side:
    """One engine's figures on one case of a result. None, or a metric that isn't there: not known."""

    name: str
    """Of the result: an instance, or a file."""
    engine: str
    case: str
    figures: Mapping[str, float]
    usd_per_hour: float | None = None

    @property
    def tokens_per_s(self) -> float | None:
        """By the first metric of `SPEEDS` that is there."""
        return next((self.figures[metric] for metric in SPEEDS if metric in self.figures), None)

    @property
    def tpot_ms(self) -> float | None:
        """Time per output token: as it was found, or of so many streams that each get their part of the throughput."""
        found = next((self.figures[metric] for metric in LATENCIES[:2] if metric in self.figures), None)
        streams, speed = self.figures.get("streams"), self.tokens_per_s
        return found if found is not None or not streams or not speed else 1e3 * streams / speed

    @property
    def usd_per_mtok(self) -> float | None:
        """Dollars per million tokens of that throughput."""
        if self.usd_per_hour is None or not self.tokens_per_s:
            return self.figures.get("usd_per_mtok")
        return self.usd_per_hour / 3600 / self.tokens_per_s * 1e6

    @property
    def conversions(self) -> float | None:
        """Share of the time."""
        return self.figures.get(CONVERSIONS)

    def without_conversions(self) -> "Side":
        """As fast as it could at most be if conversions took no time and nothing else took more: Amdahl's bound."""
        share = self.conversions or 0.0
        faster = {metric: value / (1 - share) for metric, value in self.figures.items() if metric in SPEEDS}
        sooner = {metric: value * (1 - share) for metric, value in self.figures.items() if metric in LATENCIES[:2]}
        streams = {metric: value for metric, value in self.figures.items() if metric == "streams"}
        changed = {**faster, **sooner, **streams, CONVERSIONS: 0.0}  # what else there is wouldn't hold any more
        return replace(self, figures=changed, engine=f"{self.engine} without conversions, at most")


class Line(NamedTuple):
    """One figure of both sides; a ratio above 1 is more of it on the second."""

    what: str
    unit: str
    first: float | None
    second: float | None

    @property
    def ratio(self) -> float | None:
        """The second's, of the first's."""
        return None if not self.first or self.second is None else self.second / self.first


def lines(first: Side, second: Side) -> Iterator[Line]:
    """What is known of both sides, or of one; the common figures first, then all others that both have."""
    for what, unit, name in (
        ("throughput", "tokens/s", "tokens_per_s"),
        ("time per output token", "ms", "tpot_ms"),
        ("price", "$/hour", "usd_per_hour"),
        ("cost", "$/Mtok", "usd_per_mtok"),
        ("conversions", "of the time", "conversions"),
    ):
        values = getattr(first, name), getattr(second, name)
        if values != (None, None):
            yield Line(what, unit, *values)
    told = {*SPEEDS, *LATENCIES[:2], CONVERSIONS, "usd_per_mtok", "usd_per_hour", "streams"}
    for metric in first.figures:
        if metric in second.figures and metric not in told:
            yield Line(metric.replace("_", " "), "", first.figures[metric], second.figures[metric])


class Ranking(NamedTuple):
    """Who is cheaper per token, now and if no conversions were left; None where a cost isn't known."""

    now: str | None
    without: str | None

    @property
    def turns(self) -> bool:
        """Whether the conversions decide it."""
        return None not in self and self.now != self.without


def ranking(first: Side, second: Side) -> Ranking:
    """By cost. A tie goes to the first."""
    return Ranking(_cheaper(first, second), _cheaper(first.without_conversions(), second.without_conversions()))


def verdict(first: Side, second: Side) -> str:
    """Who is cheaper, by how much, and whether that would turn without conversions."""
    costs = first.usd_per_mtok, second.usd_per_mtok
    if costs[0] is None or costs[1] is None:
        return "the cost of a token isn't known of both: give --instance-a and --instance-b, or --usd-a and --usd-b"
    found = ranking(first, second)
    low, high = sorted((costs[0], costs[1]))
    said = f"{found.now} is cheaper: ${low:.2f} against ${high:.2f} per million tokens, {high / low:.2f}x"
    if first.conversions is None and second.conversions is None:
        return f"{said}; conversions weren't measured"
    if not (first.conversions or second.conversions):
        return f"{said}; there are no conversions"
    bound = first.without_conversions().usd_per_mtok, second.without_conversions().usd_per_mtok
    assert bound[0] is not None
    assert bound[1] is not None
    low, high = sorted((bound[0], bound[1]))
    then = f"without conversions, at most, {found.without} would be: ${low:.2f} against ${high:.2f}"
    return f"{said}; {then}: the ranking {'turns' if found.turns else 'stays'}"


def _cheaper(first: Side, second: Side) -> str | None:
    if first.usd_per_mtok is None or second.usd_per_mtok is None:
        return None
    return first.name if first.usd_per_mtok <= second.usd_per_mtok else second.name
