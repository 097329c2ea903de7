import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pannier.planner import Setup, StepTime, TraceRequest, Work, ideal_hit_rate, lane_bound, simulate


@dataclass(frozen=True)
class FixedClock:
    """Every step takes equally long."""

    compute_s: float = 1.0
    attention_s: float = 0.0
    transfer_s: float = 0.0

    def step_time(self, work: Work) -> StepTime:
        return StepTime(self.compute_s, dict.fromkeys(work.tokens_read, self.attention_s), self.transfer_s)


SETUP = Setup(groups=(1000,), block_size=4, max_batch_tokens=16, max_sequences=8)


def equal(count: int, prompt: int, output: int) -> list[TraceRequest]:
    return [TraceRequest(0.0, prompt, output)] * count


def mixed(count: int, seed: int = 0) -> list[TraceRequest]:
    draw = random.Random(seed)
    return [TraceRequest(number * 0.7, draw.randint(1, 40), draw.randint(1, 20)) for number in range(count)]


def conversations(count: int, seed: int = 0) -> Iterator[TraceRequest]:
    """A trace like Mooncake's: a common beginning, and turns that repeat what was said before."""
    draw = random.Random(seed)
    said: list[tuple[int, ...]] = [(0,)]
    next_id = 1
    for number in range(count):
        before = draw.choice(said[-20:])
        new = tuple(range(next_id, next_id + draw.randint(1, 3)))
        next_id += len(new)
        length = 512 * len(before + new) - draw.choice((0, 1, draw.randint(2, 511)))
        yield TraceRequest(float(number), length, draw.randint(1, 4), before + new)
        said.append((before + new)[: length // 512])


TIMES = {
    "compute is the slower": (3.0, 1.0, 0.5),
    "attention is the slower": (1.0, 4.0, 0.5),
    "both devices wait": (1.0, 1.0, 6.0),
    "all alike": (2.0, 2.0, 0.0),
    "nothing but compute": (1.0, 0.0, 0.0),
}


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("times", TIMES.values(), ids=TIMES.keys())
def test_equal_lanes_settle_at_the_bound_of_the_design(times: tuple[float, float, float], lanes: int) -> None:
    """max(T_m, T_a, (T_m + T_a + T_c) / 2) a step with two lanes, the sum with one."""
    result = simulate(equal(2 * lanes, 4, 300), replace(SETUP, lanes=lanes), FixedClock(*times))
    assert result.seconds / result.steps == pytest.approx(lane_bound(*times, lanes=lanes), rel=0.02)


def test_replicas_share_the_attention_pool() -> None:
    """Two with four lanes are twice as fast as one while attention has time for both, and then no more."""
    for attention_s, gain in ((0.5, 2.0), (1.0, 2.0), (1.5, 4 / 3), (4.0, 1.0)):
        clock = FixedClock(2.0, attention_s, 0.0)
        one = simulate(equal(8, 4, 200), SETUP, clock)
        two = simulate(equal(8, 4, 200), replace(SETUP, replicas=2), clock)
        assert (two.steps / two.seconds) / (one.steps / one.seconds) == pytest.approx(gain, rel=0.03)


def test_groups_work_at_the_same_time() -> None:
    """Attention takes half as long a sequence when two groups have half of them each."""
    clock = FixedClock(0.1, 2.0, 0.0)
    setup = replace(SETUP, groups=(500, 500))
    result = simulate(equal(2, 4, 200), setup, clock)
    assert result.seconds == pytest.approx(200 * 2.1, rel=0.02)


def test_busy_shares_are_of_the_whole_time() -> None:
    """With one lane the devices take turns."""
    result = simulate(equal(2, 4, 300), replace(SETUP, lanes=1), FixedClock(3.0, 1.0, 1.0))
    assert result.compute_busy == pytest.approx(3 / 5, rel=0.01)
    assert result.attention_busy == pytest.approx(1 / 5, rel=0.01)


def test_times_of_a_single_request_are_those_of_its_steps() -> None:
    """Three chunks to the first token, one step a token from there."""
    result = simulate([TraceRequest(5.0, 40, 11)], SETUP, FixedClock(1.0))
    assert (result.ttft_s.mean, result.tpot_s.mean, result.queueing_s.mean) == (3.0, 1.0, 0.0)
    assert (result.seconds, result.steps) == (13.0, 13)
    assert result.step_rows.largest == 16


def test_a_request_queues_from_its_arrival_until_it_has_blocks() -> None:
    """One sequence at a time: the second waits for the first, the third for both."""
    setup = replace(SETUP, max_sequences=1)
    result = simulate(equal(3, 4, 10), setup, FixedClock(1.0))
    assert result.queueing_s.mean == pytest.approx((0 + 10 + 20) / 3)
    assert result.ttft_s.mean == pytest.approx((1 + 11 + 21) / 3)
    assert (result.peak_running, result.peak_waiting) == (1, 2)


def test_the_same_requests_give_the_same_result() -> None:
    """Every figure, to the last digit."""
    setup = replace(SETUP, replicas=2, groups=(30, 20))
    assert simulate(mixed(200), setup, FixedClock(0.3, 0.2, 0.1)) == simulate(
        iter(mixed(200)), setup, FixedClock(0.3, 0.2, 0.1)
    )


@given(
    requests=st.lists(
        st.builds(TraceRequest, st.just(0.0), st.integers(1, 40), st.integers(1, 20), st.none()),
        min_size=1,
        max_size=40,
    ),
    gap=st.sampled_from([0.0, 0.1, 3.0]),
    blocks=st.lists(st.integers(16, 60), min_size=1, max_size=3),
    replicas=st.integers(1, 2),
    lanes=st.integers(1, 3),
    max_waiting=st.sampled_from([None, 1, 5]),
    patience_s=st.sampled_from([float("inf"), 4.0]),
    one_at_a_time=st.booleans(),
    plan_ahead=st.integers(1, 2),
)
@settings(max_examples=60, deadline=None)
def test_every_request_ends_once_and_every_token_is_counted(
    requests: list[TraceRequest],
    gap: float,
    blocks: list[int],
    replicas: int,
    lanes: int,
    max_waiting: int | None,
    patience_s: float,
    one_at_a_time: bool,
    plan_ahead: int,
) -> None:
    """Done, refused or given up; blocks scarce or plenty; whatever the lanes."""
    setup = replace(
        SETUP,
        groups=tuple(blocks),
        replicas=replicas,
        lanes=lanes,
        max_waiting=max_waiting,
        patience_s=patience_s,
        one_at_a_time=one_at_a_time,
        plan_ahead=plan_ahead,
    )
    arriving = [request._replace(arrival_s=number * gap) for number, request in enumerate(requests)]
    result = simulate(arriving, setup, FixedClock(0.5, 0.5, 0.1))
    refused = sum(result.refused.values())
    assert result.requests + refused + result.given_up == len(requests)
    assert result.ttft_s.count == result.requests
    assert result.queueing_s.count >= result.requests
    if result.requests == len(requests):
        assert result.prompt_tokens == sum(each.prompt_length for each in requests)
        assert result.output_tokens == sum(each.output_length for each in requests)
    if max_waiting is None:
        assert not refused  # every group holds the longest of them
    assert result.mean_blocks <= result.peak_blocks + 1e-9
    assert max(result.compute_busy, result.attention_busy) <= 1 + 1e-9
    assert result.peak_blocks <= result.blocks == sum(blocks)


def test_a_bounded_queue_refuses_and_an_unbounded_one_does_not() -> None:
    """Of 50 requests at once, 2 may wait for the 1 that runs."""
    setup = replace(SETUP, max_sequences=1, max_waiting=2)
    bounded = simulate(equal(50, 4, 4), setup, FixedClock(1.0))
    assert bounded.refused == {"overloaded": 50 - bounded.requests}
    assert bounded.requests <= 3
    assert simulate(equal(50, 4, 4), replace(setup, max_waiting=None), FixedClock(1.0)).requests == 50


def test_a_request_that_no_group_can_hold_is_refused_with_its_code() -> None:
    """And the others go on."""
    requests = [TraceRequest(0.0, 4000, 20), TraceRequest(0.0, 4, 4)]
    result = simulate(requests, replace(SETUP, groups=(10,)), FixedClock(1.0))
    assert (result.requests, result.refused) == (1, {"invalid": 1})


def test_whoever_has_no_token_in_time_gives_up() -> None:
    """It is cancelled, wherever it is, and costs nothing from then on."""
    setup = replace(SETUP, max_sequences=1, patience_s=12.5)
    result = simulate(equal(5, 4, 10), setup, FixedClock(1.0))
    assert (result.requests, result.given_up) == (2, 3)
    assert result.seconds == 20.0


def test_scarce_blocks_preempt_and_everything_still_ends() -> None:
    """What is computed again takes time: fewer tokens a second than with room."""
    requests = equal(16, 8, 60)
    scarce = simulate(requests, replace(SETUP, groups=(40,)), FixedClock(1.0))
    plenty = simulate(requests, SETUP, FixedClock(1.0))
    assert scarce.preemptions > 0 == plenty.preemptions
    assert scarce.output_tokens == plenty.output_tokens == 16 * 60
    assert scarce.peak_blocks > 36
    assert scarce.output_tokens_per_s < plenty.output_tokens_per_s


def test_one_at_a_time_each_request_comes_when_the_one_before_is_done() -> None:
    """So nobody waits, and only one runs."""
    result = simulate(mixed(30), replace(SETUP, one_at_a_time=True), FixedClock(1.0))
    assert (result.requests, result.peak_running) == (30, 1)
    assert result.queueing_s.largest == 0


def test_with_unlimited_room_the_hit_rate_is_the_ideal_one() -> None:
    """One at a time, blocks of the 512 tokens that a hash id stands for; without the cache it is 0."""
    requests = list(conversations(150))
    setup = Setup(groups=(3000,), block_size=512, max_batch_tokens=4096, one_at_a_time=True)
    result = simulate(requests, setup, FixedClock(1.0))
    assert ideal_hit_rate(requests) > 0.4
    assert result.hit_rate == pytest.approx(ideal_hit_rate(requests), rel=0.01)
    assert simulate(requests, replace(setup, prefix_cache=False), FixedClock(1.0)).hit_rate == 0


def test_prefix_hits_save_time() -> None:
    """A chunk starts behind what is cached."""
    requests = list(conversations(40))
    setup = Setup(groups=(3000,), block_size=64, max_batch_tokens=1024, one_at_a_time=True)
    with_cache = simulate(requests, setup, FixedClock(1.0))
    without = simulate(requests, replace(setup, prefix_cache=False), FixedClock(1.0))
    assert with_cache.ttft_s.mean < without.ttft_s.mean
    assert with_cache.steps < without.steps


def test_a_trace_without_requests_takes_no_time() -> None:
    """All figures are 0, and none divides by it."""
    result = simulate([], SETUP, FixedClock(1.0))
    assert (result.requests, result.seconds, result.requests_per_s, result.hit_rate) == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"lanes": 0}, "lanes is 0"),
        ({"replicas": 0}, "replicas is 0"),
        ({"groups": ()}, "groups is"),
        ({"groups": (5, 0)}, "groups is"),
        ({"patience_s": 0.0}, "patience_s is 0"),
        ({"block_size": 0}, "block_size is 0"),
    ],
)
def test_a_set_up_that_cannot_work_is_refused_by_name(change: dict[str, object], says: str) -> None:
    """Before anything is simulated."""
    with pytest.raises(ValueError, match=says):
        replace(SETUP, **change)  # type: ignore[arg-type]  # any field
