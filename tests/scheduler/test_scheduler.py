"""What the scheduler promises, one promise at a time."""

from array import array
from typing import Any

import pytest

from pannier.scheduler import UNRESOLVED, Inconsistent, Output, Rejected, Request, Scheduler, Step
from pannier.scheduler.blocks import Ints
from pannier.wire.messages import Drawn, Filters, Previous, Sample, SegmentKind, TopLogprob

from .rig import scheduler_with

pytestmark = pytest.mark.timeout(30)

TOKEN = 5
EOS = 9


def request(sequence: int, length: int = 3, max_tokens: int = 4, samples: int = 1, **fields: Any) -> Request:
    """A request whose prompt has nothing in common with those of others."""
    prompt = array("i", [1000 * (sequence + 1), *range(101, 100 + length)][:length])
    return Request(sequences=tuple(range(sequence, sequence + samples)), prompt=prompt, max_tokens=max_tokens, **fields)


def planned(scheduler: Scheduler, lane: int = 0) -> Step:
    step = scheduler.schedule(lane)
    scheduler.check()
    assert step is not None
    return step


def committed(scheduler: Scheduler, step: Step, token: int = TOKEN) -> list[Output]:
    """Commit the step as if every sample had drawn `token`."""
    outputs = scheduler.commit(step.step, [Drawn(sample.sequence, token, None, ()) for sample in step.samples])
    scheduler.check()
    return outputs


def stepped(scheduler: Scheduler, lane: int = 0, token: int = TOKEN) -> list[Output]:
    return committed(scheduler, planned(scheduler, lane), token)


def rows_of(step: Step) -> list[int]:
    return [segment.num_queries for segment in step.segments]


def free_blocks(scheduler: Scheduler, group: int = 0) -> int:
    return scheduler.pools[group].available


# --- rows -----------------------------------------------------------------------------------------------------------


def test_a_prompt_is_one_fresh_chunk_whose_last_row_draws() -> None:
    scheduler = scheduler_with()
    scheduler.add(request(7, length=3, filters=Filters(0.5), seed=11, logprobs=2))
    step = planned(scheduler)
    (segment,) = step.segments
    assert (segment.kind, segment.num_stored, segment.query_position) == (SegmentKind.CHUNK, 0, 0)
    assert (segment.query_start, segment.num_queries) == (0, 3)
    assert list(step.token_ids) == [8000, 101, 102]
    assert step.samples == (
        Sample(2, 7, 3, 0, seed=11, filters=Filters(0.5), top_logprobs=2, state_version=0, mask=-1),
    )
    assert step.previous == ()


def test_no_logprobs_are_asked_for_as_minus_one() -> None:
    scheduler = scheduler_with()
    scheduler.add(request(7))
    assert planned(scheduler).samples[0].top_logprobs == -1


def test_a_long_prompt_is_cut_to_the_token_budget_and_only_its_end_draws() -> None:
    scheduler = scheduler_with(max_batch_tokens=8, max_sequences=8, plan_ahead=3)
    scheduler.add(request(0, length=20))
    steps = [planned(scheduler) for _ in range(3)]
    assert [rows_of(step) for step in steps] == [[8], [8], [4]]
    assert [len(step.samples) for step in steps] == [0, 0, 1]
    assert [step.segments[0].num_stored for step in steps] == [0, 8, 16]
    assert list(steps[1].token_ids) == list(range(108, 116))


def test_decode_rows_come_first_and_prompts_share_what_they_leave() -> None:
    scheduler = scheduler_with(max_batch_tokens=8, max_sequences=8)
    scheduler.add(request(0, length=3))
    stepped(scheduler)
    scheduler.add(request(1, length=5))
    scheduler.add(request(2, length=9))
    step = planned(scheduler)
    assert [segment.kind for segment in step.segments] == [SegmentKind.DECODE, SegmentKind.CHUNK, SegmentKind.CHUNK]
    assert rows_of(step) == [1, 5, 2]


def test_the_last_token_of_a_prompt_is_still_a_chunk() -> None:
    scheduler = scheduler_with(max_batch_tokens=8, max_sequences=8)
    scheduler.add(request(0, length=9))
    stepped(scheduler)
    (segment,) = planned(scheduler).segments
    assert (segment.kind, segment.num_stored, segment.num_queries) == (SegmentKind.CHUNK, 8, 1)


def test_chunks_with_a_past_go_before_fresh_ones() -> None:
    """Answered rows come first, also when a sequence that came from another lane stands behind a newer one."""
    scheduler = scheduler_with(lanes=2, max_batch_tokens=8, max_sequences=8)
    scheduler.add(request(0, length=10))
    stepped(scheduler, lane=0)
    scheduler.add(request(1, length=3))
    planned(scheduler, lane=1)
    scheduler.drop(1)
    scheduler.remove_lane(0)
    step = planned(scheduler, lane=1)
    assert [segment.num_stored for segment in step.segments] == [8, 0]
    assert [sample.sequence for sample in step.samples] == [0, 1]
    assert [sample.row for sample in step.samples] == [1, 4]


def test_a_step_names_the_blocks_that_its_tokens_need() -> None:
    scheduler = scheduler_with()
    scheduler.add(request(0, length=4, max_tokens=9))
    first, second = planned(scheduler), planned(scheduler)
    assert (len(first.blocks), len(second.blocks)) == (1, 2)
    assert first.blocks[0] == second.blocks[0]
    assert second.segments[0].num_blocks == 2


# --- planning ahead -------------------------------------------------------------------------------------------------


def test_the_next_row_is_planned_before_its_token_is_known() -> None:
    scheduler = scheduler_with()
    scheduler.add(request(0))
    scheduler.add(request(1))
    first, second = planned(scheduler), planned(scheduler)
    assert second.previous == (Previous(0, first.step, 0), Previous(1, first.step, 1))
    assert list(second.token_ids) == [UNRESOLVED, UNRESOLVED]
    assert [segment.num_stored for segment in second.segments] == [3, 3]
    assert [segment.kind for segment in second.segments] == [SegmentKind.DECODE] * 2


def test_a_token_that_is_known_is_sent() -> None:
    scheduler = scheduler_with()
    scheduler.add(request(0))
    stepped(scheduler)
    step = planned(scheduler)
    assert (list(step.token_ids), step.previous) == ([TOKEN], ())


@pytest.mark.parametrize("plan_ahead", [1, 2, 3])
def test_no_more_steps_are_planned_than_allowed(plan_ahead: int) -> None:
    scheduler = scheduler_with(plan_ahead=plan_ahead)
    scheduler.add(request(0, max_tokens=9))
    steps = [planned(scheduler) for _ in range(plan_ahead)]
    assert scheduler.schedule(0) is None
    committed(scheduler, steps[0])
    assert planned(scheduler).previous == (() if plan_ahead == 1 else (Previous(0, steps[-1].step, 0),))


def test_step_by_step_sequences_wait_for_their_token() -> None:
    """Their prompts may be planned ahead, and so may other sequences' rows."""
    scheduler = scheduler_with(max_batch_tokens=8, max_sequences=8)
    scheduler.add(request(0, length=10, step_by_step=True))
    first, second = planned(scheduler), planned(scheduler)
    assert (rows_of(first), rows_of(second)) == ([8], [2])
    committed(scheduler, first)
    assert scheduler.schedule(0) is None
    committed(scheduler, second)
    assert list(planned(scheduler).token_ids) == [TOKEN]


# --- how sequences end ----------------------------------------------------------------------------------------------


def test_max_tokens_ends_with_length_and_nothing_is_planned_beyond() -> None:
    scheduler = scheduler_with()
    scheduler.add(request(0, max_tokens=2))
    first, second = planned(scheduler), planned(scheduler)
    assert committed(scheduler, first)[0].finish_reason is None
    assert scheduler.schedule(0) is None
    assert committed(scheduler, second)[0].finish_reason == "length"
    assert scheduler.is_idle
    assert free_blocks(scheduler) == 100


def test_the_window_of_the_model_ends_with_length() -> None:
    scheduler = scheduler_with(max_model_len=5)
    scheduler.add(request(0, length=3, max_tokens=100))
    assert stepped(scheduler)[0].finish_reason is None
    assert stepped(scheduler)[0].finish_reason == "length"


def test_an_eos_token_is_reported_and_ends_with_stop() -> None:
    scheduler = scheduler_with()
    scheduler.add(request(0, stop_tokens=frozenset({EOS})))
    (output,) = stepped(scheduler, token=EOS)
    assert output == Output(0, Drawn(0, EOS, None, ()), "stop")


def test_what_was_drawn_is_passed_on_with_its_logprobs() -> None:
    scheduler = scheduler_with()
    scheduler.add(request(0, logprobs=1))
    drawn = Drawn(0, TOKEN, -0.5, (TopLogprob(TOKEN, -0.5),))
    assert scheduler.commit(planned(scheduler).step, [drawn]) == [Output(0, drawn, None)]


def test_a_row_planned_ahead_of_the_end_is_discarded_and_then_the_blocks_return() -> None:
    scheduler = scheduler_with()
    scheduler.add(request(0, stop_tokens=frozenset({EOS})))
    first, second = planned(scheduler), planned(scheduler)
    committed(scheduler, first, token=EOS)
    assert free_blocks(scheduler) < 100, "the second step still names its blocks"
    assert committed(scheduler, second) == []
    assert free_blocks(scheduler) == 100


@pytest.mark.parametrize("how", ["cancel", "finish"])
def test_ending_a_sequence_in_flight_returns_its_blocks_with_the_last_step_that_names_it(how: str) -> None:
    scheduler = scheduler_with()
    scheduler.add(request(0))
    first, second = planned(scheduler), planned(scheduler)
    scheduler.cancel(0) if how == "cancel" else scheduler.finish(0)
    assert committed(scheduler, first) == []
    assert free_blocks(scheduler) < 100
    assert committed(scheduler, second) == []
    assert scheduler.is_idle
    assert free_blocks(scheduler) == 100


def test_ending_a_sequence_in_flight_returns_its_blocks_when_the_steps_are_lost() -> None:
    scheduler = scheduler_with()
    scheduler.add(request(0))
    planned(scheduler), planned(scheduler)
    scheduler.cancel(0)
    assert free_blocks(scheduler) < 100
    scheduler.drop(0)
    assert scheduler.is_idle
    assert free_blocks(scheduler) == 100


def test_cancel_and_finish_are_idempotent_and_know_no_strangers() -> None:
    scheduler = scheduler_with(max_sequences=1)
    scheduler.add(request(0))
    scheduler.add(request(1))
    step = planned(scheduler)
    scheduler.cancel(1)  # waits still
    for _ in range(2):
        scheduler.cancel(0)
        scheduler.finish(0)
        scheduler.cancel(99)
        scheduler.finish(99)
        scheduler.check()
    committed(scheduler, step)
    assert scheduler.is_idle


# --- steps that are lost --------------------------------------------------------------------------------------------


def test_dropped_steps_are_planned_again_the_same() -> None:
    scheduler = scheduler_with()
    scheduler.add(request(0, length=5))
    scheduler.add(request(1, length=9))
    stepped(scheduler)
    before = [planned(scheduler), planned(scheduler)]
    assert scheduler.drop(0) == [step.step for step in before]
    scheduler.check()
    after = [planned(scheduler), planned(scheduler)]
    for old, new in zip(before, after, strict=True):
        assert new.step > before[-1].step
        assert (old.segments, old.token_ids, old.blocks, old.samples) == (
            new.segments,
            new.token_ids,
            new.blocks,
            new.samples,
        )
    assert after[1].previous == tuple(Previous(row, after[0].step, row) for row in range(2))


def test_abort_takes_the_later_steps_of_the_lane_along_and_leaves_the_earlier() -> None:
    scheduler = scheduler_with(lanes=2, plan_ahead=3)
    scheduler.add(request(0, max_tokens=9))
    scheduler.add(request(1, max_tokens=9))
    other = planned(scheduler, lane=1)
    first, second, third = (planned(scheduler) for _ in range(3))
    assert scheduler.abort(second.step) == [second.step, third.step]
    scheduler.check()
    assert [scheduler.lane_of(step.step) for step in (other, first, second, third)] == [1, 0, None, None]
    again = planned(scheduler)
    assert again.previous == (Previous(0, first.step, 0),)


def test_aborting_a_step_that_is_over_does_nothing() -> None:
    scheduler = scheduler_with()
    scheduler.add(request(0))
    step = planned(scheduler)
    committed(scheduler, step)
    assert scheduler.abort(step.step) == []
    assert scheduler.fail(step.step, "late") == []
    assert scheduler.num_running == 1


def test_a_failed_step_ends_its_sequences_and_no_others() -> None:
    scheduler = scheduler_with(lanes=2)
    for number in range(3):
        scheduler.add(request(number))
    failing = planned(scheduler, lane=0)
    behind = planned(scheduler, lane=0)
    scheduler.cancel(2)
    assert scheduler.fail(failing.step, "no such kernel") == [Output(0, None, "error", "no such kernel")]
    scheduler.check()
    assert scheduler.lane_of(failing.step) is None
    assert scheduler.lane_of(behind.step) is None
    assert [stepped(scheduler, lane=1)[0].sequence, scheduler.num_running] == [1, 1]


class UpTo:
    """Allows anything for as many tokens, and then nothing: a `Constraint`."""

    def __init__(self, most: int) -> None:
        self.most = most

    def allowed(self, outputs: Ints) -> bytes:
        if len(outputs) > self.most:
            raise Rejected("invalid", "guide", f"nothing fits behind {len(outputs)} tokens")
        return bytes([len(outputs), 255, 255, 255])


@pytest.mark.parametrize("samples", [1, 2])
def test_a_constraint_that_comes_to_a_dead_end_ends_its_sequences_and_no_others(samples: int) -> None:
    """Behind what was drawn, with its reason; the blocks come back."""
    scheduler = scheduler_with()
    scheduler.add(request(0, samples=samples, constraint=UpTo(1)))
    scheduler.add(request(5))
    assert planned(scheduler).masks == (bytes([0, 255, 255, 255]),)
    scheduler.drop(0)
    stepped(scheduler)
    outputs = stepped(scheduler)
    errors = [Output(each, None, "error", "nothing fits behind 2 tokens") for each in range(samples)]
    assert outputs[-samples:] == errors
    assert sorted(each.sequence for each in outputs[:-samples]) == [*range(samples), 5]
    assert [each.finish_reason for _ in range(2) for each in stepped(scheduler)] == [None, "length"]
    assert scheduler.is_idle
    assert scheduler.pools[0].used == 0


def test_a_request_whose_constraint_allows_nothing_is_refused() -> None:
    scheduler = scheduler_with()
    with pytest.raises(Rejected, match="nothing fits behind 0 tokens"):
        scheduler.add(request(0, constraint=UpTo(-1)))
    scheduler.check()
    assert scheduler.is_idle


def test_steps_commit_in_the_order_of_their_lane() -> None:
    scheduler = scheduler_with()
    scheduler.add(request(0))
    first, second = planned(scheduler), planned(scheduler)
    with pytest.raises(ValueError, match=f"step {second.step} is not the oldest"):
        committed(scheduler, second)
    committed(scheduler, first)
    with pytest.raises(ValueError, match=f"step {first.step} is not the oldest"):
        committed(scheduler, first)
    committed(scheduler, second)


def test_a_step_commits_with_the_draws_of_its_own_samples() -> None:
    scheduler = scheduler_with()
    scheduler.add(request(0))
    step = planned(scheduler)
    for drawn in ([], [Drawn(1, TOKEN, None, ())]):
        with pytest.raises(ValueError, match=r"its samples are of \[0\]"):
            scheduler.commit(step.step, drawn)
    scheduler.check()
    assert committed(scheduler, step)


# --- lanes and groups -----------------------------------------------------------------------------------------------


def test_sequences_go_to_the_emptiest_lane() -> None:
    scheduler = scheduler_with(lanes=3)
    for number in range(7):
        scheduler.add(request(number))
    assert [len(planned(scheduler, lane).segments) for lane in range(3)] == [3, 2, 2]
    scheduler.cancel(1)
    scheduler.cancel(4)
    scheduler.add(request(7))
    assert 7 in [sample.sequence for sample in planned(scheduler, lane=1).samples]


def test_sequences_of_a_removed_lane_go_on_where_they_were() -> None:
    scheduler = scheduler_with(lanes=2)
    for number in range(2):
        scheduler.add(request(number))
    stepped(scheduler, lane=0)
    planned(scheduler, lane=0)
    scheduler.remove_lane(0)
    scheduler.check()
    step = planned(scheduler, lane=1)
    assert [segment.num_stored for segment in step.segments] == [3, 0]
    assert step.token_ids[0] == TOKEN


def test_without_lanes_sequences_wait_and_lose_nothing() -> None:
    scheduler = scheduler_with()
    scheduler.add(request(0))
    stepped(scheduler)
    scheduler.remove_lane(0)
    scheduler.add(request(1))
    scheduler.check()
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)
    scheduler.add_lane(5)
    assert [segment.num_stored for segment in planned(scheduler, lane=5).segments] == [3, 0]


def test_a_sequence_goes_to_the_group_with_most_free_blocks() -> None:
    scheduler = scheduler_with(blocks=(10, 12))
    for number in range(3):
        scheduler.add(request(number, length=12, max_tokens=1))  # 3 blocks
    assert [segment.group for segment in planned(scheduler).segments] == [1, 0, 1]


def test_what_a_lost_group_held_is_computed_again_in_another() -> None:
    scheduler = scheduler_with(blocks=(10, 9))
    for number in range(3):
        scheduler.add(request(number))
    step = planned(scheduler)
    assert [segment.group for segment in step.segments] == [0, 0, 1]
    assert scheduler.lose_group(0) == []
    scheduler.drop(0)
    scheduler.check()
    again = planned(scheduler)
    assert [segment.group for segment in again.segments] == [1, 1, 1]
    assert scheduler.lose_group(0) == []


def test_tokens_that_were_drawn_before_a_group_was_lost_are_kept() -> None:
    scheduler = scheduler_with(blocks=(10, 9))
    scheduler.add(request(0))
    stepped(scheduler)
    scheduler.lose_group(0)
    (segment,) = planned(scheduler).segments
    assert (segment.group, segment.num_stored, segment.num_queries) == (1, 0, 4)


def test_a_lane_plans_nothing_behind_a_step_that_names_a_lost_group() -> None:
    """Such a step never ends; what is planned behind it would have to be taken back."""
    scheduler = scheduler_with(blocks=(10, 9))
    scheduler.add(request(0))
    scheduler.add(request(1))
    step = planned(scheduler)
    scheduler.lose_group(0)
    assert scheduler.schedule(0) is None
    scheduler.abort(step.step)
    assert [segment.group for segment in planned(scheduler).segments] == [1, 1]


def test_requests_that_only_the_lost_group_could_hold_end() -> None:
    scheduler = scheduler_with(blocks=(10, 3), max_sequences=2)
    scheduler.add(request(0, length=4, max_tokens=30))
    scheduler.add(request(1, length=4, max_tokens=1))
    planned(scheduler)
    scheduler.add(request(2, length=20))
    scheduler.add(request(3))
    outputs = scheduler.lose_group(0)
    assert [(output.sequence, output.finish_reason) for output in outputs] == [(0, "error"), (2, "error")]
    assert "group 0" in str(outputs[0].reason)


def test_a_group_number_is_never_used_again() -> None:
    scheduler = scheduler_with(blocks=(10, 10))
    scheduler.lose_group(0)
    for group in (0, 1):
        with pytest.raises(ValueError, match=f"group {group} exists or existed"):
            scheduler.add_group(group, 10)


def test_lanes_that_are_not_there_are_named() -> None:
    scheduler = scheduler_with(lanes=2)
    for call in (scheduler.schedule, scheduler.drop, scheduler.remove_lane):
        with pytest.raises(ValueError, match=r"lane 7 is unknown; lanes are \[0, 1\]"):
            call(7)
    with pytest.raises(ValueError, match=r"lane 1 exists; lanes are \[0, 1\]"):
        scheduler.add_lane(1)


# --- admission ------------------------------------------------------------------------------------------------------


def test_nobody_overtakes_a_request_that_waits_for_blocks() -> None:
    """With an endless stream of small requests the large one still gets its turn."""
    scheduler = scheduler_with(blocks=(10,), max_sequences=8)
    for number in range(4):
        scheduler.add(request(number, max_tokens=3 + number))
    stepped(scheduler)
    scheduler.add(request(50, length=30, max_tokens=8))  # 10 blocks: all there are
    drawn: list[int] = []
    for number in range(100, 120):
        scheduler.add(request(number))
        drawn += [output.sequence for output in stepped(scheduler)]
        if 50 in drawn:
            break
    assert 50 in drawn
    assert not any(number >= 100 for number in drawn[: drawn.index(50)])


def test_no_more_sequences_run_than_allowed() -> None:
    scheduler = scheduler_with(lanes=2, max_sequences=3)
    for number in range(5):
        scheduler.add(request(number, max_tokens=1))
    steps = [planned(scheduler, lane) for lane in range(2)]
    assert (scheduler.num_running, scheduler.num_waiting) == (3, 2)
    for step in steps:
        committed(scheduler, step)
    assert len(planned(scheduler, 0).segments) + len(planned(scheduler, 1).segments) == 2


def test_a_full_queue_is_overload() -> None:
    scheduler = scheduler_with(max_waiting=2)
    scheduler.add(request(0))
    scheduler.add(request(1))
    with pytest.raises(Rejected, match="2 requests are waiting already") as caught:
        scheduler.add(request(2))
    assert caught.value.code == "overloaded"
    planned(scheduler)
    scheduler.add(request(2))


@pytest.mark.parametrize(
    ("length", "max_tokens", "param", "reason"),
    [
        (3, 0, "max_tokens", "max_tokens is 0; it must be at least 1"),
        (0, 1, "prompt", "the prompt has 0 tokens; 1 to 199 are possible"),
        (200, 1, "prompt", "the prompt has 200 tokens; 1 to 199 are possible"),
        (62, 1, "prompt", "need 16 blocks of 4 tokens"),
        (60, 3, "max_tokens", "need 16 blocks of 4 tokens"),
    ],
)
def test_what_could_never_run_is_refused(length: int, max_tokens: int, param: str, reason: str) -> None:
    scheduler = scheduler_with(blocks=(10, 5))
    with pytest.raises(Rejected, match=reason) as caught:
        scheduler.add(request(0, length=length, max_tokens=max_tokens))
    assert (caught.value.code, caught.value.param) == ("invalid", param)
    assert scheduler.is_idle


def test_the_refusal_says_what_would_fit() -> None:
    scheduler = scheduler_with(blocks=(10, 5), token_bytes=4096)
    with pytest.raises(Rejected, match="each token 4096 bytes of K and V") as caught:
        scheduler.add(request(0, length=60))
    assert [line.split() for line in caught.value.reason.splitlines()[1:]] == [
        ["group", "blocks", "longest"],
        ["0", "10", "41"],
        ["1", "5", "21"],
        ["all", "15", "61"],
    ]
    scheduler.add(request(1, length=60, max_tokens=1))


def test_a_cancelled_sequence_without_a_lane_is_gone() -> None:
    scheduler = scheduler_with()
    scheduler.add(request(0))
    stepped(scheduler)
    scheduler.remove_lane(0)
    scheduler.cancel(0)
    scheduler.check()
    assert scheduler.is_idle
    assert free_blocks(scheduler) == 100


def test_a_sequence_takes_blocks_as_it_grows_and_none_for_its_last_token() -> None:
    scheduler = scheduler_with()
    scheduler.add(request(0, length=3, max_tokens=6))
    free = []
    while not scheduler.is_idle:
        step = planned(scheduler)
        free.append(free_blocks(scheduler))
        committed(scheduler, step)
    assert free == [99, 99, 98, 98, 98, 98]
    assert free_blocks(scheduler) == 100


def test_without_attention_workers_requests_are_refused() -> None:
    with pytest.raises(Rejected, match="no attention workers") as caught:
        scheduler_with(blocks=()).add(request(0))
    assert caught.value.code == "unavailable"


def test_a_sequence_number_is_used_once() -> None:
    scheduler = scheduler_with()
    scheduler.add(request(0))
    with pytest.raises(ValueError, match="sequence 0 exists"):
        scheduler.add(request(0))


# --- configuration and books ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"plan_ahead": 0}, "plan_ahead is 0; it must be at least 1"),
        ({"block_size": 0}, "block_size is 0; it must be at least 1"),
        ({"max_model_len": 1}, "max_model_len is 1; it must be at least 2"),
        (
            {"max_batch_tokens": 8, "max_sequences": 9},
            r"max_batch_tokens is 8; it must be at least max_sequences \(9\)",
        ),
    ],
)
def test_limits_that_cannot_work_are_refused(limits: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        scheduler_with(**limits)


def test_check_sees_a_block_that_is_gone() -> None:
    scheduler = scheduler_with()
    scheduler.add(request(0))
    planned(scheduler)
    scheduler.pools[0].allocate(1)
    with pytest.raises(Inconsistent, match="block 1 of group 0: 0 holders, 1 counted"):
        scheduler.check()
