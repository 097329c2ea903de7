"""What ends a step other than its end: aborts, failures, new sessions; and what is owed before it ends."""

from collections.abc import Callable

import msgspec
import pytest
from transformers import LlamaForCausalLM

from pannier.compute.link import Link, Received, Tensors
from pannier.net import PeerGone
from pannier.slicer import SlicedModel
from pannier.wire import ComputeToAttention
from pannier.wire import messages as m

from .rig import LIFE, HeldLink, Stack, accept, assert_drawn, texts

pytestmark = pytest.mark.timeout(120)


def abort(stack: Stack, step: int, lane: int = 0) -> None:
    stack.core.obey(m.AbortStep(LIFE, stack.session, step, lane), [])


@pytest.mark.parametrize("answers", [0, 1, 2])
def test_a_step_aborted_in_the_middle(whole: LlamaForCausalLM, sliced: SlicedModel, answers: int) -> None:
    """The abort is passed on and acknowledged when every worker has; the lane's next step is right."""
    stack = Stack(sliced, shards=(2,), wrap=HeldLink)
    kept, given_up = texts([9, 6], seed=1)
    links = [stack.link("a0.0"), stack.link("a0.1")]
    for link in links:
        link.held = False
    (done,) = stack.run(stack.step().last_chunk(kept).made())
    accept(kept, done.drawn[0])
    for link in links:
        link.held = True
    aborted = stack.step().decode(kept).chunk(given_up, 6).made()
    kept.stored -= 1
    stack.send(aborted)
    stack.pump()
    for _ in range(answers):
        for link in links:
            link.let_through(1)
        stack.pump()
    abort(stack, aborted.message.step)
    stack.pump()
    links[0].let_through()
    stack.pump()
    stack.take(m.StepAborted, 0)
    links[1].held = links[0].held = False
    stack.pump()
    assert [reply.step for reply in stack.take(m.StepAborted)] == [aborted.message.step]
    (done,) = stack.run(stack.step().decode(kept).made())
    assert_drawn(whole, kept.tokens, done.drawn[0])


def test_a_queued_step_is_aborted_with_those_behind_it(sliced: SlicedModel) -> None:
    """What was not begun is only forgotten; the step under way goes on; unknown steps are acknowledged too."""
    stack = Stack(sliced, wrap=HeldLink)
    a, b, c = texts([5, 5, 5])
    first, second, third = (stack.step().last_chunk(text).made() for text in (a, b, c))
    for step in (first, second, third):
        stack.send(step)
    stack.pump()
    for step_number in (second.message.step, 99):
        abort(stack, step_number)
    assert [reply.step for reply in stack.take(m.StepAborted, 2)] == [second.message.step, 99]
    stack.link().held = False
    stack.pump()
    assert [reply.step for reply in stack.take(m.StepDone)] == [first.message.step]


def test_done_means_written(sliced: SlicedModel) -> None:
    """`StepDone` comes only after the acknowledgement of every worker."""
    stack = Stack(sliced, shards=(2,), wrap=HeldLink)
    (text,) = texts([6])
    stack.send(stack.step().last_chunk(text).made())
    stack.pump()
    one, other = stack.link("a0.0"), stack.link("a0.1")
    assert [type(link.sent[-1]) for link in (one, other)] == [m.EndStep, m.EndStep]
    one.let_through()
    stack.pump()
    stack.take(m.StepDone, 0)
    other.let_through(2)  # all but the last, which says that the step is written
    stack.pump()
    stack.take(m.StepDone, 0)
    other.let_through()
    stack.pump()
    stack.take(m.StepDone)


def test_a_step_that_a_worker_cannot_do(whole: LlamaForCausalLM, sliced: SlicedModel) -> None:
    """The failure names the worker and its reason; nothing runs behind it in that lane, until the next session."""
    stack = Stack(sliced, shards=(2,))
    bad, good, beside = texts([6, 7, 5], seed=2)
    bad.blocks = [64, 65]
    steps = [stack.step().last_chunk(bad).made(), stack.step().last_chunk(good).made()]
    other_lane = stack.step(lane=1).last_chunk(beside).made()
    for step in (*steps, other_lane):
        stack.send(step)
    stack.pump()
    by_kind = {type(reply): reply for reply in stack.replies}
    assert len(stack.replies) == len(by_kind) == 2
    failed, done = by_kind[m.StepFailed], by_kind[m.StepDone]
    assert isinstance(failed, m.StepFailed)
    assert failed.step == steps[0].message.step
    assert failed.reason.startswith("a0.")
    assert "block outside 0..63" in failed.reason
    assert isinstance(done, m.StepDone)
    assert_drawn(whole, beside.tokens, done.drawn[0])
    stack.replies.clear()
    stack.new_session()
    good.stored = 0
    (again,) = stack.run(stack.step().last_chunk(good).made())
    assert_drawn(whole, good.tokens, again.drawn[0])


class BrokenLink(HeldLink):
    """A link whose peer has left."""

    def send(self, message: ComputeToAttention, tensors: Tensors) -> None:
        if isinstance(message, m.Piece):
            raise PeerGone("a peer can't be reached: it is not there")
        super().send(message, tensors)


def test_a_step_whose_worker_has_gone(sliced: SlicedModel) -> None:
    """A link that is broken fails the step that needs it, not the compute worker."""
    stack = Stack(sliced, wrap=BrokenLink)
    (text,) = texts([6])
    stack.send(stack.step().last_chunk(text).made())
    stack.pump()
    assert "a peer can't be reached" in stack.take(m.StepFailed)[0].reason


class DefectLink(HeldLink):
    """A link with a bug that certain pieces bring out."""

    def send(self, message: ComputeToAttention, tensors: Tensors) -> None:
        if isinstance(message, m.Piece) and message.lane == 0:
            raise IndexError("a bug")
        super().send(message, tensors)


def test_a_step_that_brings_out_a_defect(whole: LlamaForCausalLM, sliced: SlicedModel) -> None:
    """It fails alone: were it the process that ended, the next process would be given the same step."""
    stack = Stack(sliced, wrap=DefectLink)
    poison, beside = texts([6, 5])
    stack.send(stack.step().last_chunk(poison).made())
    stack.send(stack.step(lane=1).last_chunk(beside).made())
    stack.link().held = False
    stack.pump()
    by_kind = {type(reply): reply for reply in stack.replies}
    failed, done = by_kind[m.StepFailed], by_kind[m.StepDone]
    assert isinstance(failed, m.StepFailed)
    assert failed.reason == "IndexError: a bug"
    assert isinstance(done, m.StepDone)
    assert_drawn(whole, beside.tokens, done.drawn[0])
    stack.replies.clear()


def test_a_group_without_a_link(sliced: SlicedModel) -> None:
    """A step that names a group the worker was never told of fails, and says which."""
    stack = Stack(sliced)
    (text,) = texts([6])
    text.group = 3
    stack.send(stack.step().last_chunk(text).made())
    stack.pump()
    assert "names group 3, to which there is no link" in stack.take(m.StepFailed)[0].reason


def test_a_new_session_forgets_the_one_before(whole: LlamaForCausalLM, sliced: SlicedModel) -> None:
    """Steps under way and queued are gone, late answers are counted as stale, drawn tokens can't be referred to."""
    stack = Stack(sliced, wrap=HeldLink)
    (text,) = texts([7], seed=3)
    stack.link().held = False
    first = stack.step().last_chunk(text).made()
    stack.run(first)
    stack.link().held = True
    stack.send(stack.step().decode_previous(text, first, 0).made())
    stack.send(stack.step().decode_previous(text, first, 0).made())
    stack.pump()
    stack.new_session()
    stack.link().held = False
    stack.pump()
    assert stack.core.counters["stale_frames"] == 1
    stack.send(stack.step().decode_previous(text, first, 0).made())
    stack.pump()
    assert "needs tokens of step" in stack.take(m.StepFailed)[0].reason
    stack.new_session()
    text.stored = 0
    (done,) = stack.run(stack.step().last_chunk(text).made())
    assert_drawn(whole, text.tokens, done.drawn[0])


def test_steps_of_another_session_or_life_are_dropped(sliced: SlicedModel) -> None:
    """They are counted and answered by nothing, aborts as well."""
    stack = Stack(sliced)
    (text,) = texts([7])
    step = stack.step().last_chunk(text).made()
    stack.new_session()
    stack.send(step)
    stack.core.obey(m.AbortStep(LIFE + 1, 2, 1, 0), [])
    stack.pump()
    assert stack.replies == []
    assert stack.core.counters["stale_frames"] == 2


def test_an_answer_from_a_worker_that_has_no_part_in_the_step(sliced: SlicedModel) -> None:
    """It is counted as stale, and the step goes on."""
    stack = Stack(sliced, shards=(1, 1), wrap=HeldLink)
    (text,) = texts([7])
    step = stack.step().last_chunk(text).made()
    stack.send(step)
    stack.pump()
    stranger: Link = stack.link("a1.0")
    stack.core.receive(stranger, m.PieceWritten(LIFE, 1, step.message.step, 0, 0), [])
    assert stack.core.counters["stale_frames"] == 1
    stack.link().held = False
    stack.pump()
    stack.take(m.StepDone)


WRONG: dict[str, Callable[[m.Answer, Tensors], Received]] = {
    "other call": lambda answer, tensors: (msgspec.structs.replace(answer, call=answer.call + 1), tensors),
    "too few tensors": lambda answer, tensors: (answer, tensors[:1]),
    "too few rows": lambda answer, tensors: (answer, [tensor[1:] for tensor in tensors]),
    "other dtype": lambda answer, tensors: (answer, [tensors[0].double(), tensors[1]]),
    "other sums": lambda answer, tensors: (answer, [tensors[0], tensors[1].half()]),
    "a piece that was not sent": lambda answer, _: (m.PieceWritten(LIFE, 1, answer.step, answer.lane, 0), []),
}


@pytest.mark.parametrize("spoil", WRONG.values(), ids=WRONG)
def test_an_answer_that_does_not_fit_what_was_asked(
    sliced: SlicedModel, spoil: Callable[[m.Answer, Tensors], Received]
) -> None:
    """It fails its step, and the compute worker goes on."""
    stack = Stack(sliced, lanes=1, wrap=HeldLink)
    link = stack.link()
    link.held = False
    (text,) = texts([7])
    (done,) = stack.run(stack.step().last_chunk(text).made())
    accept(text, done.drawn[0])
    link.held = True
    stack.send(stack.step().decode(text).made())
    stack.pump()
    link.let_through()
    answer, tensors = link.receive() or (None, [])
    assert isinstance(answer, m.Answer)
    stack.core.receive(link, *spoil(answer, tensors))
    assert "a0.0 sent an answer that nobody asked for" in stack.take(m.StepFailed)[0].reason
