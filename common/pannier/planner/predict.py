"""How long a lane-step takes on a machine that was measured beforehand: the parts from its profile, put together.

Nothing is fitted: a profile knows what slices, attention calls, exchanges over links and the engine's own work take by
themselves; how they add up is the cost model's claim, and `scripts/bench plan` holds it against what is measured.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from pannier.planner.overlap import Parts, lane_step_bound
from pannier.planner.profile import EngineCost, Profile
from pannier.planner.sizes import ModelSizes
from pannier.runtime.errors import ConfigError

LINK = "shm"


@dataclass(frozen=True, kw_only=True)
class Case:
    """Decode steps of equal rows."""

    model: ModelSizes
    dtype: str
    rows: int
    """Of a lane-step."""
    context: float
    """Tokens that each row sees, on average."""
    lanes: int = 1
    is_monolithic: bool = False
    delay_s: float = 0.0
    """Each way, of an emulated link."""
    bandwidth: float | None = None
    """Bytes per second each way, of an emulated link."""


@dataclass(frozen=True)
class Prediction:
    """Seconds of a lane-step, and of its parts when nothing else runs."""

    seconds: float
    parts: Parts
    reading: Parts
    """What of the parts goes by with reading weights, and K and V, at the profile's rate."""
    held_by: str
    lanes: int = 0
    """0: monolithic."""


def predict(profile: Profile, case: Case, cores: int) -> Prediction:
    """From a profile. Raises `ConfigError` if it lacks what the case needs.

    Monolithic, everything has all cores, and takes turns. Offloaded, each of both workers has half of them. With two
    lanes both work at a time and read from one memory: each is slowed as beside a reader, for the part of a step in
    which the other one is busy.
    """
    engine = _engine(profile, case.is_monolithic)
    threads = cores if case.is_monolithic else max(1, cores // 2)
    parts = _parts(profile, case, threads, engine.call_s, is_shared=False)
    reading = _reading(profile, case, threads, parts)
    if case.is_monolithic:
        return Prediction(sum(parts) + engine.step_s, parts, reading, "both in turn")
    bound = lane_step_bound(parts, case.lanes)
    if case.lanes > 1:
        beside = _parts(profile, case, threads, engine.call_s, is_shared=True)
        parts = Parts(
            _mixed(parts.compute_s, beside.compute_s, parts.attention_s / bound.seconds),
            _mixed(parts.attention_s, beside.attention_s, parts.compute_s / bound.seconds),
            parts.transfer_s,
        )
        bound = lane_step_bound(parts, case.lanes)
    return Prediction(bound.seconds + engine.step_s, parts, reading, bound.held_by, case.lanes)


def _parts(profile: Profile, case: Case, threads: int, call_s: float, *, is_shared: bool) -> Parts:
    calls = len(case.model.calls)
    return Parts(
        _slices(profile, case, threads, is_shared) + calls * call_s,
        calls * _attention(profile, case, threads, is_shared),
        0.0 if case.is_monolithic else _transfer(profile, case),
    )


def _mixed(alone: float, beside: float, share: float) -> float:
    return alone + share * max(0.0, beside - alone)


def _reading(profile: Profile, case: Case, threads: int, parts: Parts) -> Parts:
    rate = profile.read_by_threads.get(threads, profile.read_bytes_per_s)
    kv_bytes = case.rows * case.model.kv_read_bytes(case.context)
    weights_s, kv_s = case.model.read_bytes(case.rows) / rate, kv_bytes / rate
    return Parts(min(parts.compute_s, weights_s), min(parts.attention_s, kv_s), 0.0)


def scaled(prediction: Prediction, factor: float) -> Prediction:
    """As if memory took so many times as long to be read; nothing else takes longer, or less long."""
    lanes, reading = prediction.lanes, prediction.reading
    parts = Parts(*(part + (factor - 1) * read for part, read in zip(prediction.parts, reading, strict=True)))
    return replace(
        prediction,
        seconds=prediction.seconds + _together(parts, lanes) - _together(prediction.parts, lanes),
        parts=parts,
        reading=Parts(*(factor * read for read in reading)),
    )


def _together(parts: Parts, lanes: int) -> float:
    """Seconds of a lane-step without what the engine adds; with no lanes its parts follow each other."""
    return lane_step_bound(parts, lanes).seconds if lanes else sum(parts)


def _engine(profile: Profile, is_monolithic: bool) -> EngineCost:
    for each in profile.engine:
        if each.is_monolithic == is_monolithic:
            return each
    raise ConfigError("the profile lacks the engine's own costs: pannier bench device --model measures them")


def _slices(profile: Profile, case: Case, threads: int, is_shared: bool) -> float:
    found = {
        each.rows: each.seconds
        for each in profile.slices
        if (each.model, each.dtype, each.threads, each.is_shared) == (case.model.name, case.dtype, threads, is_shared)
    }
    return between(found, case.rows, f"slices of {case.model.name} on {threads} threads")


def _attention(profile: Profile, case: Case, threads: int, is_shared: bool) -> float:
    """Linear in the context for each number of rows, and then in the rows."""
    by_rows: dict[int, dict[float, float]] = {}
    for each in profile.attention:
        if (each.model, each.dtype, each.threads, each.is_shared) == (case.model.name, case.dtype, threads, is_shared):
            by_rows.setdefault(each.rows, {})[each.context] = each.seconds
    what = f"attention of {case.model.name} on {threads} threads"
    return between({rows: between(found, case.context, what) for rows, found in by_rows.items()}, case.rows, what)


def _transfer(profile: Profile, case: Case) -> float:
    sent, returned = case.rows * case.model.sent_bytes, case.rows * case.model.returned_bytes
    calls = len(case.model.calls)
    found = {each.size: each.round_trip_s for each in profile.links if each.kind == LINK}
    seconds = calls * (between(found, (sent + returned) / 2 / calls, "links through shared memory") + 2 * case.delay_s)
    return seconds if case.bandwidth is None else seconds + (sent + returned) / case.bandwidth


def between(found: dict[int, float] | dict[float, float], at: float, what: str) -> float:
    """On the straight line between the two measured neighbours, or on the last one's. Raises `ConfigError` for none."""
    points: Sequence[tuple[float, float]] = sorted(found.items())
    if not points:
        raise ConfigError(f"the profile lacks {what}: pannier bench device --model measures them")
    if len(points) == 1:
        return points[0][1]
    (x0, y0), (x1, y1) = _neighbours(points, at)
    return max(y0 + (y1 - y0) * (at - x0) / (x1 - x0), 0.0)


def _neighbours(points: Iterable[tuple[float, float]], at: float) -> tuple[tuple[float, float], tuple[float, float]]:
    pairs = list(pairwise(points))
    return next(((low, high) for low, high in pairs if at <= high[0]), pairs[-1])
