from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pannier.planner.predict import Case, between, predict, scaled
from pannier.planner.profile import AttentionTime, EngineCost, LinkRate, Profile, SliceTime
from pannier.runtime.errors import ConfigError
from tests.planner.engines import MODEL

CALLS = len(MODEL.calls)


def slices(threads: int, rows: int, seconds: float, *, is_shared: bool = False) -> SliceTime:
    return SliceTime(
        model=MODEL.name, dtype="bfloat16", threads=threads, rows=rows, is_shared=is_shared, seconds=seconds
    )


def attention(threads: int, rows: int, context: int, seconds: float, *, is_shared: bool = False) -> AttentionTime:
    return AttentionTime(
        model=MODEL.name,
        dtype="bfloat16",
        threads=threads,
        rows=rows,
        context=context,
        is_shared=is_shared,
        seconds=seconds,
    )


PROFILE = Profile(
    accelerator="cpu",
    source="a test",
    threads=2,
    memory_bytes=1e9,
    read_bytes_per_s=2e9,
    attention_bytes_per_s=1e9,
    links=[LinkRate(kind="shm", size=size, round_trip_s=size * 1e-8) for size in (1000, 1_000_000)],
    slices=[
        *(slices(2, rows, 0.010 + 0.001 * rows) for rows in (1, 64)),
        *(slices(1, rows, 0.020 + 0.002 * rows, is_shared=shared) for rows in (1, 64) for shared in (False, True)),
    ],
    attention=[
        attention(threads, rows, context, rows * context * 1e-7 * (3 - threads), is_shared=shared)
        for threads, shared in ((2, False), (1, False), (1, True))
        for rows in (1, 64)
        for context in (100, 1000)
    ],
    engine=[
        EngineCost(is_monolithic=True, call_s=0.0, step_s=0.003),
        EngineCost(is_monolithic=False, call_s=0.0001, step_s=0.002),
    ],
)
CASE = Case(model=MODEL, dtype="bfloat16", rows=10, context=500)


def test_a_value_lies_on_the_line_between_its_measured_neighbours() -> None:
    """Behind the last one on the line of the last two; never below nothing."""
    found = {1.0: 10.0, 3.0: 30.0, 5.0: 90.0}
    assert [between(found, at, "x") for at in (1, 2, 4, 6)] == [10, 20, 60, 120]
    assert between({1.0: 10.0, 2.0: 1.0}, 5, "x") == 0
    assert between({1.0: 10.0}, 7, "x") == 10


def test_monolithic_parts_take_turns_on_all_cores() -> None:
    found = predict(PROFILE, replace(CASE, is_monolithic=True), cores=2)
    assert found.parts == pytest.approx((0.020, CALLS * 10 * 500e-7, 0.0))
    assert found.seconds == pytest.approx(sum(found.parts) + 0.003)


def test_offloaded_parts_have_half_of_the_cores_and_a_link_between_them() -> None:
    """One lane: the sum; the engine's own work of each call is the compute worker's."""
    found = predict(PROFILE, CASE, cores=2)
    size = 10 * (MODEL.sent_bytes + MODEL.returned_bytes) / 2 / CALLS
    assert found.parts.compute_s == pytest.approx(0.040 + CALLS * 0.0001)
    assert found.parts.attention_s == pytest.approx(CALLS * 10 * 500e-7 * 2)
    assert found.parts.transfer_s == pytest.approx(CALLS * size * 1e-8)
    assert found.seconds == pytest.approx(sum(found.parts) + 0.002)


def test_two_lanes_are_held_by_the_slower_worker_or_half_of_the_round() -> None:
    found = predict(PROFILE, replace(CASE, lanes=2), cores=2)
    slower = max(found.parts.compute_s, found.parts.attention_s, sum(found.parts) / 2)
    assert found.seconds == pytest.approx(slower + 0.002)


def test_two_workers_slow_each_other_only_while_both_are_busy() -> None:
    """Beside a reader attention takes twice as long; compute is busy for a part of each step."""
    slower = [
        attention(1, each.rows, each.context, each.seconds * 2, is_shared=True)
        for each in PROFILE.attention
        if each.threads == 1 and not each.is_shared
    ]
    kept = [each for each in PROFILE.attention if not each.is_shared]
    case, changed = replace(CASE, lanes=2), msgspec.structs.replace(PROFILE, attention=[*kept, *slower])
    alone, both = (predict(each, case, cores=2) for each in (PROFILE, changed))
    busy = alone.parts.compute_s / (alone.seconds - 0.002)
    assert both.parts.attention_s == pytest.approx(alone.parts.attention_s * (1 + busy))


def test_an_emulated_link_adds_its_delay_to_every_call_and_its_rate_to_every_byte() -> None:
    plain = predict(PROFILE, CASE, cores=2).parts.transfer_s
    delayed = predict(PROFILE, replace(CASE, delay_s=0.001), cores=2).parts.transfer_s
    assert delayed - plain == pytest.approx(2 * CALLS * 0.001)
    slow = predict(PROFILE, replace(CASE, bandwidth=1e6), cores=2).parts.transfer_s
    assert slow - plain == pytest.approx(10 * (MODEL.sent_bytes + MODEL.returned_bytes) / 1e6)


def test_slower_memory_prolongs_what_reads_and_nothing_else() -> None:
    """Reading takes what it does at the profile's rate, and never more than there is of the part."""
    found = predict(PROFILE, CASE, cores=2)
    slower = scaled(found, 1.5)
    assert 0 < found.reading.compute_s <= found.parts.compute_s
    assert slower.parts.attention_s - found.parts.attention_s == pytest.approx(0.5 * found.reading.attention_s)
    assert slower.parts.transfer_s == found.parts.transfer_s
    assert slower.seconds - found.seconds == pytest.approx(0.5 * sum(found.reading))
    assert scaled(found, 1.0).seconds == pytest.approx(found.seconds)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"dtype": "float32"}, "lacks slices of round"),
        ({"model": replace(MODEL, name="other")}, "lacks slices of other"),
    ],
)
def test_what_was_not_measured_is_not_predicted(change: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        predict(PROFILE, replace(CASE, **change), cores=2)  # type: ignore[arg-type]


@given(st.integers(1, 64), st.floats(100, 4000), st.integers(1, 2), st.floats(0, 0.01))
def test_longer_contexts_and_slower_links_never_make_a_step_shorter(
    rows: int, context: float, lanes: int, delay_s: float
) -> None:
    case = replace(CASE, rows=rows, context=context, lanes=lanes)
    base = predict(PROFILE, case, cores=2).seconds
    assert predict(PROFILE, replace(case, context=context * 1.5), cores=2).seconds >= base * (1 - 1e-9)
    assert predict(PROFILE, replace(case, delay_s=delay_s), cores=2).seconds >= base * (1 - 1e-9)
