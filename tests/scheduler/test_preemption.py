"""What the scheduler promises when blocks are short, about ranks, lanes, deadlines and sampler states."""

from array import array
from typing import Any

import pytest

from pannier.scheduler import Request, Scheduler, Step, Unplanned
from pannier.scheduler.sequence import Sequence
from pannier.wire.messages import Drawn, Penalties, SamplerRules, SegmentKind

from .rig import scheduler_with

pytestmark = pytest.mark.timeout(30)

RULES = SamplerRules(Penalties(repetition=1.5))


def request(*sequences: int, length: int = 3, max_tokens: int = 4, **fields: Any) -> Request:
    prompt = array("i", [1000 * (sequences[0] + 1), *range(101, 100 + length)])
    return Request(sequences=sequences, prompt=prompt, max_tokens=max_tokens, **fields)


def commit(scheduler: Scheduler, step: Step | None) -> list[int]:
    """Commit; the sequences that drew something."""
    assert step is not None
    outputs = scheduler.commit(step.step, [Drawn(sample.sequence, 5, None, ()) for sample in step.samples])
    scheduler.check()
    return [output.sequence for output in outputs]


def ends(scheduler: Scheduler) -> list[int]:
    """Run all to the end; the sequences in the order in which they ended."""
    ended: list[int] = []
    for _ in range(500):
        if scheduler.is_idle:
            return ended
        for lane in scheduler.lanes:
            step = scheduler.schedule(lane)
            if step is not None:
                outputs = scheduler.commit(step.step, [Drawn(each.sequence, 5, None, ()) for each in step.samples])
                ended += [output.sequence for output in outputs if output.finish_reason]
                scheduler.check()
    raise AssertionError("somebody starves")


# --- when blocks are short ------------------------------------------------------------------------------------------


def test_the_youngest_is_preempted_and_ends_all_the_same() -> None:
    scheduler = scheduler_with(blocks=(6,), prefix_cache=False)
    for number in range(3):
        scheduler.add(request(number, length=4, max_tokens=12))
    assert ends(scheduler) == [0, 1, 2]
    preempted = scheduler.take_preemptions()
    assert set(preempted) == {1, 2}
    assert scheduler.take_preemptions() == []


def test_a_preempted_sequence_keeps_its_tokens_and_computes_them_again() -> None:
    scheduler = scheduler_with(blocks=(4,), prefix_cache=False, plan_ahead=1)
    for number in range(2):
        scheduler.add(request(number, length=4, max_tokens=9))
    for _ in range(5):
        commit(scheduler, scheduler.schedule(0))
    step = scheduler.schedule(0)
    assert step is not None
    assert scheduler.take_preemptions() == [1]
    while scheduler.num_waiting:
        commit(scheduler, step)
        step = scheduler.schedule(0)
        assert step is not None
    (segment,) = step.segments
    assert (segment.num_stored, segment.num_queries) == (0, 9)
    assert list(step.token_ids[4:]) == [5, 5, 5, 5, 5]


def test_under_the_priority_policy_the_last_priority_is_preempted_first_and_admitted_last() -> None:
    scheduler = scheduler_with(blocks=(6,), prefix_cache=False, policy="priority")
    for number, priority in enumerate([2, 0, 1]):
        scheduler.add(request(number, length=4, max_tokens=12, priority=priority))
    assert ends(scheduler) == [1, 2, 0]


def test_first_come_first_served_whatever_the_priority() -> None:
    scheduler = scheduler_with(blocks=(3,), policy="fcfs")
    for number, priority in enumerate([2, 0, 1]):
        scheduler.add(request(number, length=4, max_tokens=8, priority=priority))
    assert ends(scheduler) == [0, 1, 2]


def test_who_outgrows_a_small_group_goes_on_in_a_larger_one() -> None:
    scheduler = scheduler_with(blocks=(4, 9), prefix_cache=False)
    scheduler.add(request(0, length=24, max_tokens=4))
    scheduler.add(request(1, length=4, max_tokens=28))
    assert ends(scheduler) == [0, 1]
    assert scheduler.take_preemptions() == [1]


def test_nobody_is_preempted_while_steps_under_way_may_give_blocks_back() -> None:
    scheduler = scheduler_with(blocks=(4,), prefix_cache=False)
    scheduler.add(request(0, length=4, max_tokens=6))
    scheduler.add(request(1, length=7, max_tokens=2))
    ends(scheduler)
    assert scheduler.take_preemptions() == []


def test_newcomers_take_no_blocks_that_a_running_sequence_waits_for() -> None:
    scheduler = scheduler_with(blocks=(5,), prefix_cache=False)
    scheduler.add(request(0, length=4, max_tokens=17))
    for number in range(1, 30):
        scheduler.add(request(number, length=4, max_tokens=4))
    assert ends(scheduler)[-1] == 29


def test_a_single_row_that_is_computed_again_is_a_chunk_also_behind_the_prompt() -> None:
    """Decode rows stand before all chunks: there it would be taken for one of another sequence's rows."""
    scheduler = scheduler_with(blocks=(10, 10), max_batch_tokens=1, max_sequences=1, plan_ahead=1)
    scheduler.add(request(0, length=2, max_tokens=9))
    for _ in range(4):
        commit(scheduler, scheduler.schedule(0))
    scheduler.lose_group(0)
    kinds = []
    for _ in range(5):
        step = scheduler.schedule(0)
        commit(scheduler, step)
        assert step is not None
        kinds += [segment.kind for segment in step.segments]
    assert kinds == [SegmentKind.CHUNK] * 4 + [SegmentKind.DECODE]


def test_the_work_of_preempting_many_grows_with_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not all looked at for each that has to go."""
    number, looks = 200, 0

    def rank(sequence: Sequence) -> tuple[int, int, int]:
        nonlocal looks
        looks += 1
        return sequence.rank

    scheduler = scheduler_with(
        blocks=(number + 9,), max_batch_tokens=1000, max_sequences=number, plan_ahead=1, prefix_cache=False
    )
    for each in range(number):
        scheduler.add(request(each, length=4))
    commit(scheduler, scheduler.schedule(0))
    monkeypatch.setattr("pannier.scheduler.scheduler._rank", rank)
    scheduler.schedule(0)
    assert len(scheduler.take_preemptions()) > number // 3
    assert looks < 4 * number


# --- lanes ----------------------------------------------------------------------------------------------------------


def test_sequences_change_lanes_when_one_lane_has_ended_more_of_them() -> None:
    scheduler = scheduler_with(lanes=2)
    for number in range(8):
        scheduler.add(request(number, max_tokens=2 if number % 2 else 30))  # lane 1 gets the short ones
    for _ in range(12):
        for lane in range(2):
            step = scheduler.schedule(lane)
            if step is not None:
                commit(scheduler, step)
    rows = [len(step.segments) for lane in range(2) if (step := scheduler.schedule(lane))]
    assert rows == [2, 2]


def test_a_long_sequence_weighs_as_much_as_several_short_ones() -> None:
    scheduler = scheduler_with(lanes=2, blocks=(1000,), max_model_len=4000, max_batch_tokens=4000)
    scheduler.add(request(0, length=2000))
    for number in range(1, 6):
        scheduler.add(request(number, length=10))
    sizes = [len(step.segments) for lane in range(2) if (step := scheduler.schedule(lane))]
    assert sizes == [1, 5]


# --- deadlines ------------------------------------------------------------------------------------------------------


def test_requests_end_with_an_error_at_their_deadline() -> None:
    scheduler = scheduler_with()
    scheduler.add(request(0, deadline=10.0))
    scheduler.add(request(1, 2, deadline=20.0))
    scheduler.add(request(3))
    step = scheduler.schedule(0)
    assert scheduler.expire(9.9) == []
    assert [(output.sequence, output.finish_reason) for output in scheduler.expire(10.0)] == [(0, "error")]
    commit(scheduler, step)
    assert sorted(output.sequence for output in scheduler.expire(99.0)) == [1, 2]
    assert ends(scheduler) == [3]


# --- sampler states -------------------------------------------------------------------------------------------------


def test_a_state_is_sent_with_the_first_draw_and_not_again() -> None:
    scheduler = scheduler_with()
    scheduler.add(request(0, rules=RULES))
    first, second = scheduler.schedule(0), scheduler.schedule(0)
    assert first is not None
    assert second is not None
    assert [(state.sequence, state.output_tokens) for state in first.states] == [(0, ())]
    assert second.states == ()
    assert [step.samples[0].state_version for step in (first, second)] == [1, 2]


def test_draws_that_need_nothing_of_the_past_have_no_state() -> None:
    scheduler = scheduler_with()
    scheduler.add(request(0))
    step = scheduler.schedule(0)
    assert step is not None
    assert (step.states, step.samples[0].state_version) == ((), 0)


@pytest.mark.parametrize(("repetition", "tokens"), [(1.0, ()), (1.5, (3, 9))])
def test_a_state_has_the_prompts_tokens_once_and_only_where_repetition_is_penalised(
    repetition: float, tokens: tuple[int, ...]
) -> None:
    scheduler = scheduler_with()
    rules = SamplerRules(Penalties(repetition, presence=1.0), min_tokens=2)
    scheduler.add(Request(sequences=(0,), prompt=array("i", [9, 3, 9]), max_tokens=4, rules=rules))
    step = scheduler.schedule(0)
    assert step is not None
    assert [state.prompt_tokens for state in step.states] == [tokens]


def test_every_sample_of_a_prompt_has_a_state_of_its_own() -> None:
    scheduler = scheduler_with()
    scheduler.add(request(0, 1, rules=RULES))
    step = scheduler.schedule(0)
    assert step is not None
    assert [state.sequence for state in step.states] == [0, 1]
    commit(scheduler, step)
    second = scheduler.schedule(0)
    assert second is not None
    assert second.states == ()


def test_states_are_sent_again_with_what_was_drawn_when_the_session_has_ended() -> None:
    scheduler = scheduler_with()
    scheduler.add(request(0, max_tokens=9, rules=RULES))
    commit(scheduler, scheduler.schedule(0))
    commit(scheduler, scheduler.schedule(0))
    scheduler.drop(0)
    step = scheduler.schedule(0)
    assert step is not None
    assert [state.output_tokens for state in step.states] == [(5, 5)]


def test_a_lost_step_that_told_nothing_leaves_what_was_told() -> None:
    scheduler = scheduler_with()
    scheduler.add(request(0, max_tokens=9, rules=RULES))
    commit(scheduler, scheduler.schedule(0))
    step = scheduler.schedule(0)
    assert step is not None
    scheduler.abort(step.step)
    again = scheduler.schedule(0)
    assert again is not None
    assert again.states == ()


def test_a_step_can_be_had_again_with_its_states() -> None:
    scheduler = scheduler_with()
    scheduler.add(request(0, 1, max_tokens=9, rules=RULES))
    step = scheduler.schedule(0)
    assert step is not None
    assert scheduler.step_with_states(step.step) == step
    commit(scheduler, step)
    second, third = scheduler.schedule(0), scheduler.schedule(0)
    assert second is not None
    assert third is not None
    again = scheduler.step_with_states(second.step)
    assert [(state.sequence, state.output_tokens) for state in again.states] == [(0, (5,)), (1, (5,))]
    assert again.segments == second.segments
    with pytest.raises(Unplanned, match="is not the oldest"):
        scheduler.step_with_states(third.step)
