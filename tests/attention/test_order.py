"""Frames may come in any order; a lane's steps still happen one after the other."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pannier.wire import messages as m

from .rig import (
    Frame,
    Hand,
    MadeStep,
    Stored,
    assert_answers,
    chunk,
    contents,
    decode,
    feed,
    kinds,
    make_core,
    unchanged,
)

pytestmark = pytest.mark.timeout(60)


def two_steps(hand: Hand) -> tuple[MadeStep, MadeStep, MadeStep]:
    """What was there before, and two steps of one lane, the second of which attends to what the first stores."""
    a, b = Stored([5, 1, 7]), Stored([0, 4, 2])
    before = hand.only(0, [chunk(a, 5)])
    first = hand.only(1, [decode(a), chunk(b, 6)], piece_rows=2)
    second = hand.only(2, [decode(a), chunk(b, 2)])
    return before, first, second


@settings(max_examples=25, deadline=None)
@given(st.randoms(use_true_random=False))
def test_any_order_gives_the_same_answers(shuffler: random.Random) -> None:
    """Pieces and ends before their beginnings, and a step's frames among those of the step before it: same answers.

    All that is fixed is that a step's begin comes before the next one's, as a lane begins one when the other is over.
    """
    core, hand = make_core(), Hand()
    before, first, second = two_steps(hand)
    feed(core, before.frames)
    frames: list[Frame] = [*first.frames, *second.frames]
    shuffler.shuffle(frames)
    places = sorted(i for i, (message, _) in enumerate(frames) if isinstance(message, m.BeginStep))
    frames[places[0]], frames[places[1]] = first.begin, second.begin
    replies = feed(core, frames)
    of_step = {number: [reply for reply in replies if reply[0].step == number] for number in (1, 2)}
    assert_answers([of_step[1]], first.answers)
    assert_answers([of_step[2]], second.answers)
    for number in (1, 2):
        assert kinds(of_step[number]).count("StepWritten") == 1
        assert kinds(of_step[number])[-1] == "StepWritten"
    assert [message.step for message, _ in replies] == sorted(message.step for message, _ in replies)
    assert core.counters == {"steps": 3}


def test_the_next_step_waits_for_the_end_of_the_one_before() -> None:
    """Whatever of the next step has come, nothing of it is copied, written or answered before the first is complete."""
    core, hand = make_core(), Hand()
    before, first, second = two_steps(hand)
    feed(core, before.frames)
    feed(core, [first.begin, *first.pieces])
    written = contents(core)
    copying = m.BeginStep(*_numbers(second), _begin(second).segments, (m.BlockCopy(0, 5, 30),), ())
    assert feed(core, [(copying, second.begin[1]), *second.pieces, second.end]) == []
    assert unchanged(core, written)
    assert kinds(feed(core, [first.end]))[0] == "StepWritten"
    assert not unchanged(core, written)


def test_lanes_and_compute_workers_do_not_wait_for_each_other() -> None:
    """Steps of two lanes and of two compute workers run interleaved, numbers and all, with answers of their own."""
    core = make_core(num_blocks=60)
    hands = [Hand(lane=0, seed=1), Hand(lane=1, seed=2), Hand(lane=0, seed=3)]
    names = ["c0", "c0", "c1"]
    sequences = [Stored(range(10 * i, 10 * i + 5)) for i in range(3)]
    for number, made in enumerate(
        zip(
            *[
                [hand.only(0, [chunk(s, 9)]), *[hand.only(n, [decode(s)]) for n in (1, 2, 3)]]
                for hand, s in zip(hands, sequences, strict=True)
            ],
            strict=True,
        )
    ):
        replies: list[list[tuple[object, object]]] = [[], [], []]
        for frames in zip(*[step.frames for step in made], strict=True):
            for i, frame in enumerate(frames):
                replies[i] += feed(core, [frame], names[i])
        for step, own in zip(made, replies, strict=True):
            assert_answers([own], step.answers)  # type: ignore[list-item]
            assert kinds(own)[-1] == "StepWritten", number  # type: ignore[arg-type]


def test_pieces_announced_and_pieces_sent() -> None:
    """A step that got more pieces than its end speaks of fails; one that is complete takes no more of them."""
    core, hand = make_core(), Hand()
    sequence = Stored([0, 1, 2])
    step = hand.only(0, [chunk(sequence, 6)])
    few: Frame = (m.EndStep(*_numbers(step), 1), [])
    (message, _), *_ = feed(core, [step.begin, *step.pieces, few])[len(step.pieces) :]
    assert isinstance(message, m.StepFailed)
    assert f"{len(step.pieces)} pieces of step 0 came, which has 1" in message.reason
    for number, frames in ((1, "early"), (2, "late")):
        step = hand.only(number, [chunk(Stored([3, 4]), 2)])
        few = m.EndStep(*_numbers(step), 2), []
        order = [few, *step.pieces, step.begin] if frames == "early" else [step.begin, few, *step.pieces]
        core.counters.clear()
        assert kinds(feed(core, order)) == ["PieceWritten", "PieceWritten", "StepWritten"]
        assert core.counters["stale_frames"] == len(step.pieces) - 2


def test_what_an_aborted_step_left_early_is_forgotten() -> None:
    """Frames of a step that never began don't pile up: they are counted as stale when a later one begins."""
    core, hand = make_core(), Hand()
    lost, next_one = hand.only(0, [chunk(Stored([0, 1]), 3)]), hand.only(1, [chunk(Stored([2, 3]), 3)])
    assert feed(core, [*lost.pieces, lost.end]) == []
    assert kinds(feed(core, next_one.frames))[-1] == "StepWritten"
    assert core.counters["stale_frames"] == len(lost.pieces) + 1
    assert feed(core, [lost.begin]) == []


def _begin(step: MadeStep) -> m.BeginStep:
    begin = step.begin[0]
    assert isinstance(begin, m.BeginStep)
    return begin


def _numbers(step: MadeStep) -> tuple[int, int, int, int]:
    begin = _begin(step)
    return begin.life, begin.session, begin.step, begin.lane


def test_a_cache_of_nan_is_noticed() -> None:
    """The watch itself: a decode row over a token that was never stored answers NaN."""
    core, hand, sequence = make_core(), Hand(), Stored([0, 1])
    hand.only(0, [chunk(sequence, 2)])
    replies = feed(core, hand.only(1, [decode(sequence)]).frames)
    assert any(torch.isnan(tensors[0]).any() for message, tensors in replies if isinstance(message, m.Answer))
