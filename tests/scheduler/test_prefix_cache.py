"""What the scheduler promises about blocks that are found by their content, and about samples that share a prompt."""

from array import array
from typing import Any

import pytest

from pannier.scheduler import BlockPool, Inconsistent, Output, Request, Scheduler, Step
from pannier.wire.messages import BlockCopy, Drawn, Score, Scored, SegmentKind, TokenLogprob

from .rig import scheduler_with

pytestmark = pytest.mark.timeout(30)


def request(*sequences: int, prompt: list[int], max_tokens: int = 4, **fields: Any) -> Request:
    return Request(sequences=sequences, prompt=array("i", prompt), max_tokens=max_tokens, **fields)


def drawn_by(step: Step) -> list[Drawn]:
    """Each sample draws a token of its own."""
    return [Drawn(sample.sequence, 50 + sample.index, None, ()) for sample in step.samples]


def stepped(scheduler: Scheduler) -> tuple[Step, list[Output]]:
    step = scheduler.schedule(0)
    assert step is not None
    outputs = scheduler.commit(step.step, drawn_by(step))
    scheduler.check()
    return step, outputs


def run_to_end(scheduler: Scheduler) -> list[Output]:
    outputs = []
    while not scheduler.is_idle:
        outputs += stepped(scheduler)[1]
    return outputs


# --- prefixes -------------------------------------------------------------------------------------------------------


def test_a_prefix_that_was_computed_is_not_computed_again() -> None:
    scheduler = scheduler_with()
    scheduler.add(request(0, prompt=[*range(10)]))
    run_to_end(scheduler)
    scheduler.add(request(1, prompt=[*range(9), 99]))
    step, outputs = stepped(scheduler)
    (segment,) = step.segments
    assert (segment.kind, segment.num_stored, segment.num_queries) == (SegmentKind.CHUNK, 8, 2)
    assert list(step.token_ids) == [8, 99]
    assert outputs[0].num_cached == 8


def test_a_hit_leaves_at_least_the_last_token_of_the_prompt() -> None:
    """Its row must run: the first output is drawn from it."""
    scheduler = scheduler_with()
    scheduler.add(request(0, prompt=[*range(8)]))
    run_to_end(scheduler)
    scheduler.add(request(1, prompt=[*range(8)]))
    step, outputs = stepped(scheduler)
    assert (step.segments[0].num_stored, outputs[0].num_cached) == (4, 4)


def test_what_a_preempted_request_finds_of_its_own_is_not_called_cached() -> None:
    scheduler = scheduler_with(blocks=(7,), max_batch_tokens=3, max_sequences=3, plan_ahead=1)
    scheduler.add(request(0, prompt=[*range(4)], max_tokens=8))
    scheduler.add(request(1, prompt=[*range(100, 120)]))
    outputs = run_to_end(scheduler)
    assert scheduler.take_preemptions() == [1]
    assert {output.num_cached for output in outputs} == {0}


def test_outputs_are_found_as_well_as_prompts() -> None:
    scheduler = scheduler_with()
    scheduler.add(request(0, prompt=[*range(6)], max_tokens=4))
    run_to_end(scheduler)
    scheduler.add(request(1, prompt=[*range(6), 50, 50, 7]))
    assert stepped(scheduler)[0].segments[0].num_stored == 8


@pytest.mark.parametrize("other", [{"salt": "x"}, {"prompt_logprobs": 1}])
def test_no_hit_with_another_salt_or_where_the_prompt_is_scored(other: dict[str, Any]) -> None:
    scheduler = scheduler_with()
    scheduler.add(request(0, prompt=[*range(10)]))
    run_to_end(scheduler)
    scheduler.add(request(1, prompt=[*range(10)], **other))
    step = scheduler.schedule(0)
    assert step is not None
    assert step.segments[0].num_stored == 0


def test_no_hits_without_the_cache() -> None:
    scheduler = scheduler_with(prefix_cache=False)
    for number in range(2):
        scheduler.add(request(number, prompt=[*range(10)]))
        assert stepped(scheduler)[0].segments[0].num_stored == 0
        run_to_end(scheduler)
    assert scheduler.pools[0].free == 100


def test_a_prefix_is_shared_with_a_sequence_that_still_runs() -> None:
    scheduler = scheduler_with()
    scheduler.add(request(0, prompt=[*range(10)], max_tokens=50))
    stepped(scheduler)
    scheduler.add(request(1, prompt=[*range(10)]))
    step, _ = stepped(scheduler)
    tables = [list(step.blocks[s.first_block : s.first_block + s.num_blocks]) for s in step.segments]
    assert tables[0][:2] == tables[1][:2]
    assert tables[0][2] != tables[1][2]


def test_what_is_not_committed_is_not_shared() -> None:
    scheduler = scheduler_with()
    scheduler.add(request(0, prompt=[*range(10)]))
    assert scheduler.schedule(0) is not None
    scheduler.add(request(1, prompt=[*range(10)]))
    step = scheduler.schedule(0)
    assert step is not None
    assert [segment.num_stored for segment in step.segments] == [10, 0]


def test_blocks_let_go_longest_ago_are_given_away_first_and_ends_before_beginnings() -> None:
    scheduler = scheduler_with(blocks=(6,), max_model_len=24)
    scheduler.add(request(0, prompt=[*range(8)], max_tokens=1))
    run_to_end(scheduler)
    scheduler.add(request(1, prompt=[*range(100, 108)], max_tokens=1))
    run_to_end(scheduler)
    assert (scheduler.pools[0].cached, scheduler.pools[0].free) == (4, 2)
    scheduler.add(request(2, prompt=[*range(200, 212)], max_tokens=1))  # 3 blocks: takes one that was cached
    run_to_end(scheduler)
    scheduler.add(request(3, prompt=[*range(9)], max_tokens=1))
    assert stepped(scheduler)[1][0].num_cached == 4, "its end went, its beginning is still there"


def test_a_sequence_goes_where_its_prefix_is_unless_there_is_much_less_room() -> None:
    scheduler = scheduler_with(blocks=(20, 21))
    scheduler.add(request(0, prompt=[*range(16)], max_tokens=1))
    assert stepped(scheduler)[0].segments[0].group == 1
    scheduler.add(request(1, prompt=[*range(17)], max_tokens=1))
    step, outputs = stepped(scheduler)
    assert (step.segments[0].group, outputs[0].num_cached) == (1, 16)


# --- samples of one prompt ------------------------------------------------------------------------------------------


def test_samples_of_a_prompt_compute_it_once_and_share_its_blocks() -> None:
    scheduler = scheduler_with()
    scheduler.add(request(0, 1, 2, prompt=[*range(10)]))
    step, outputs = stepped(scheduler)
    assert [(sample.row, sample.sequence, sample.index) for sample in step.samples] == [(9, 0, 0), (9, 1, 1), (9, 2, 2)]
    assert [(output.sequence, output.drawn and output.drawn.token) for output in outputs] == [(0, 50), (1, 51), (2, 52)]
    assert scheduler.pools[0].used == 5, "two full blocks, and a tail for each"
    second, _ = stepped(scheduler)
    assert list(second.token_ids) == [50, 51, 52]
    tables = [list(second.blocks[s.first_block : s.first_block + s.num_blocks]) for s in second.segments]
    assert len({tuple(table[:2]) for table in tables}) == 1
    tails = [table[2] for table in tables]
    assert set(second.copies) == {BlockCopy(0, tails[0], tails[1]), BlockCopy(0, tails[0], tails[2])}


def test_a_copy_is_made_once() -> None:
    scheduler = scheduler_with()
    scheduler.add(request(0, 1, prompt=[*range(10)]))
    stepped(scheduler)
    assert [len(stepped(scheduler)[0].copies) for _ in range(2)] == [1, 0]


def test_a_copy_is_made_again_when_its_step_is_lost() -> None:
    scheduler = scheduler_with()
    scheduler.add(request(0, 1, prompt=[*range(10)]))
    stepped(scheduler)
    lost = [scheduler.schedule(0), scheduler.schedule(0)]
    assert all(lost)
    scheduler.drop(0)
    assert len(stepped(scheduler)[0].copies) == 1


def test_a_prompt_of_whole_blocks_needs_no_copy() -> None:
    scheduler = scheduler_with()
    scheduler.add(request(0, 1, prompt=[*range(8)]))
    stepped(scheduler)
    step, _ = stepped(scheduler)
    assert step.copies == ()
    assert len(set(step.blocks)) == 4


def test_a_sample_that_was_cancelled_before_it_was_drawn_never_runs() -> None:
    scheduler = scheduler_with()
    scheduler.add(request(0, 1, 2, prompt=[*range(10)]))
    scheduler.cancel(1)
    assert [output.sequence for output in stepped(scheduler)[1]] == [0, 2]
    assert scheduler.num_running == 2
    run_to_end(scheduler)
    assert scheduler.pools[0].used == 0


def test_cancelling_the_first_sample_before_the_prompt_is_computed_cancels_all() -> None:
    scheduler = scheduler_with()
    scheduler.add(request(0, 1, 2, prompt=[*range(10)]))
    scheduler.cancel(0)
    scheduler.check()
    assert scheduler.is_idle


def test_samples_count_as_running_before_they_are_drawn() -> None:
    scheduler = scheduler_with(max_sequences=3, max_batch_tokens=8)
    scheduler.add(request(0, 1, prompt=[*range(10)]))
    scheduler.add(request(2, 3, prompt=[*range(20, 30)]))
    scheduler.schedule(0)
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)


# --- scores ---------------------------------------------------------------------------------------------------------


def test_every_token_of_a_scored_prompt_but_the_first_is_scored_once() -> None:
    scheduler = scheduler_with(max_batch_tokens=4, max_sequences=4)
    scheduler.add(request(7, prompt=[*range(30, 40)], prompt_logprobs=2))
    places = []
    for _ in range(3):
        step = scheduler.schedule(0)
        assert step is not None
        (score,) = step.scores
        places.append((score.row, score.position, list(step.scored_tokens)))
        scored = [Scored(7, score.position, tuple(TokenLogprob(t, -1.0, ()) for t in step.scored_tokens))]
        outputs = scheduler.commit(step.step, drawn_by(step), scored)
        assert [output.scored for output in outputs if output.scored] == [scored[0].tokens]
    assert places == [(0, 1, [31, 32, 33, 34]), (0, 5, [35, 36, 37, 38]), (0, 9, [39])]


def test_scores_of_a_lost_step_are_asked_for_again_and_those_of_a_committed_one_are_not() -> None:
    scheduler = scheduler_with(max_batch_tokens=4, max_sequences=4)
    scheduler.add(request(7, prompt=[*range(30, 40)], prompt_logprobs=0))
    first, second = scheduler.schedule(0), scheduler.schedule(0)
    assert first is not None
    assert second is not None
    scheduler.commit(first.step, [], [Scored(7, 1, (TokenLogprob(0, -1.0, ()),) * 4)])
    scheduler.drop(0)
    again = scheduler.schedule(0)
    assert again is not None
    assert again.scores == second.scores == (Score(7, 0, 4, 5, 0, 0),)


# --- the pool -------------------------------------------------------------------------------------------------------


def test_a_block_with_content_is_found_until_it_is_given_away() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.publish(block, b"x")
    pool.release([block])
    assert (pool.free, pool.cached, pool.used) == (1, 1, 0)
    assert list(pool.match([b"x", b"y"])) == [block]
    pool.allocate(2)
    assert list(pool.match([b"x"])) == []
    pool.check()


def test_a_block_stays_while_anyone_holds_it() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.hold([block])
    pool.release([block])
    assert pool.is_used(block)
    pool.release([block])
    assert not pool.is_used(block)
    with pytest.raises(Inconsistent, match="released twice"):
        pool.release([block])


def test_a_block_without_content_cannot_be_held_for_it() -> None:
    with pytest.raises(Inconsistent, match="held for its content, and has none"):
        BlockPool(2).hold([1])
