"""A clock from measured lane-steps gives them back, goes on in straight lines, and says what a memory budget allows."""

import pytest

from pannier.planner.cost import StepTime, Work
from pannier.planner.measured import MeasuredClock, Sample, predict
from pannier.planner.overlap import Parts
from pannier.planner.setup import Setup

CLOCK = MeasuredClock(
    (
        Sample(1, 60, Parts(0.010, 0.0016, 0.002)),
        Sample(5, 300, Parts(0.014, 0.0040, 0.002)),
        Sample(9, 540, Parts(0.030, 0.0064, 0.004)),
    ),
    Sample(5, 5300, Parts(0.017, 0.054, 0.003)),
)
BLOCK = 64


def decode(rows: int, tokens: int) -> Work:
    return Work(rows=rows, answered_rows=rows, tokens_read={0: tokens}, pairs={0: tokens})


def times(work: Work) -> tuple[float, float, float]:
    found: StepTime = CLOCK.step_time(work)
    return found.compute_s, found.attention_s.get(0, 0.0), found.transfer_s


def test_what_was_measured_is_given_back() -> None:
    for sample in CLOCK.short:
        assert times(decode(int(sample.rows), int(sample.tokens))) == pytest.approx(tuple(sample.parts))


def test_between_and_beyond_lie_straight_lines() -> None:
    """Compute and the rest over rows, attention over the tokens that are read too; prompts take nothing."""
    assert times(decode(5, 5300)) == pytest.approx((0.014, 0.054, 0.002)), "of the long sample only attention counts"
    assert times(decode(3, 1180)) == pytest.approx((0.012, 0.0028 + 0.010, 0.002))
    assert times(decode(13, 780)) == pytest.approx((0.046, 0.0088, 0.006))
    assert times(Work(rows=500, one_way_rows=500, chunk_pairs=125_250)) == (0.0, 0.0, 0.0)


def setup(blocks: int, lanes: int = 1) -> Setup:
    """For requests that take 8 blocks from their prompt on."""
    return Setup(groups=(blocks,), lanes=lanes, block_size=BLOCK, max_batch_tokens=20 * 480, max_sequences=20)


@pytest.mark.parametrize(("blocks", "batch"), [(8, 1), (17, 2), (43, 5), (170, 20)])
def test_the_scheduler_says_how_many_fit(blocks: int, batch: int) -> None:
    found = predict(CLOCK, setup(blocks), 20, 480, 32)
    assert found.batch == batch


def test_those_that_would_be_preempted_do_not_count() -> None:
    """Five prompts of 8 blocks fit into 43; that each takes a ninth in the end does not."""
    assert predict(CLOCK, setup(43), 20, 500, 64).batch == 4


def test_the_clock_says_how_fast_they_are() -> None:
    """With one lane a step takes the sum of its parts; two lanes with half the rows each overlap."""
    one = predict(CLOCK, setup(43), 20, 480, 32)
    tokens = 5 * (480 + 16)
    assert one.tokens_per_s == pytest.approx(5 / sum(times(decode(5, tokens))), rel=0.05)
    two = predict(CLOCK, setup(82, lanes=2), 20, 480, 32)
    assert two.batch == 10
    parts = times(decode(5, tokens))
    assert two.tokens_per_s == pytest.approx(5 / max(*parts, sum(parts) / 2), rel=0.05)
