from array import array

import pytest

from pannier.planner import ModelCost, Rates, Roofline, Work, lane_bound, work_of
from pannier.planner.lamina import LLAMA3_70B, group_blocks
from pannier.scheduler import Request, Scheduler, SchedulerConfig
from pannier.wire.messages import Drawn

MODEL = ModelCost.dense(weights_bytes=2000, layers=5, width=10, queries_per_kv=2, itemsize=2)
RATES = Rates(
    compute_flops=1000,
    compute_bandwidth=100,
    attention_flops=1e6,
    attention_bandwidth=50,
    link_bandwidth=10,
    round_trip_s=0.25,
)
CLOCK = Roofline(MODEL, RATES)


def test_the_numbers_of_a_model_are_those_of_the_paper() -> None:
    """LLaMA3-70B: K and V of a token and payload of a row, derived in the paper's notation; 30 requests an H100."""
    assert LLAMA3_70B.kv_bytes == 327_680
    assert LLAMA3_70B.answered_bytes == 80 * 36_864
    assert 80e9 / (8192 * LLAMA3_70B.kv_bytes) == pytest.approx(30, abs=0.5)
    assert group_blocks(64) == int(0.9 * 4 * 96e9 / 327_680 / 64)


def test_few_rows_wait_for_the_weights_and_many_for_the_arithmetic() -> None:
    """MTIME(B) is the larger of e N / bandwidth and 2 N B / FLOP rate; chunks add their pairs."""
    assert CLOCK.step_time(Work(rows=1)).compute_s == 2000 / 100
    assert CLOCK.step_time(Work(rows=100)).compute_s == 100 * 2000 / 1000
    with_pairs = CLOCK.step_time(Work(rows=100, chunk_pairs=5050)).compute_s
    assert with_pairs == (100 * 2000 + 5050 * 4 * 10 * 5) / 1000


def test_attention_reads_every_stored_token_of_its_group() -> None:
    """ATIME(B, l) is bytes of K and V by bandwidth, for each group by itself."""
    times = CLOCK.step_time(Work(tokens_read={0: 30, 7: 10}, pairs={0: 30, 7: 10})).attention_s
    assert times == {0: 30 * MODEL.kv_bytes / 50, 7: 10 * MODEL.kv_bytes / 50}


def test_a_chunk_with_a_long_past_is_bound_by_arithmetic() -> None:
    """It reads its past once, for all its rows."""
    time = CLOCK.step_time(Work(tokens_read={0: 10}, pairs={0: 10 * 1_000_000}))
    assert time.attention_s == {0: 10 * 1_000_000 * MODEL.flops_per_pair / 1e6}


def test_answered_rows_wait_for_the_link_and_a_fresh_prompt_hides_behind_compute() -> None:
    """NTIME is payload by rate and a round trip for each call; one-way bytes count as far as they outlast compute."""
    assert CLOCK.step_time(Work(rows=1, answered_rows=1)).transfer_s == MODEL.answered_bytes / 10 + 5 * 0.25
    assert CLOCK.step_time(Work(rows=1, one_way_rows=1)).transfer_s == 0
    rows = 10
    outlasting = rows * MODEL.kv_bytes / 10 - 20
    assert CLOCK.step_time(Work(rows=rows, one_way_rows=rows)).transfer_s == outlasting > 0


def test_the_bound_of_lanes_is_that_of_the_design() -> None:
    """The sum with one lane; with two the slower device, or half the sum."""
    assert lane_bound(3, 2, 1, lanes=1) == 6
    assert lane_bound(3, 2, 1, lanes=2) == 3
    assert lane_bound(3, 2, 9, lanes=2) == 7
    assert lane_bound(1, 5, 1, lanes=2) == 5


def test_the_work_of_a_step_is_what_its_segments_say() -> None:
    """First chunk: one way. Second: attends to the first. Decode row: to everything, itself included."""
    scheduler = Scheduler(SchedulerConfig(max_model_len=100, max_batch_tokens=8, max_sequences=4, block_size=4))
    scheduler.add_group(3, 20)
    scheduler.add_lane(0)
    scheduler.add(Request(sequences=(0,), prompt=array("i", range(12)), max_tokens=5))
    steps = []
    for _ in range(3):
        step = scheduler.schedule(0)
        assert step is not None
        scheduler.commit(step.step, [Drawn(sample.sequence, 50, None, ()) for sample in step.samples])
        steps.append(step)
    assert [work_of(step) for step in steps] == [
        Work(rows=8, chunk_pairs=36, one_way_rows=8),
        Work(rows=4, chunk_pairs=10, answered_rows=4, tokens_read={3: 8}, pairs={3: 32}),
        Work(rows=1, answered_rows=1, tokens_read={3: 13}, pairs={3: 13}),
    ]
