"""Steps give what the uncut model gives, however rows, lanes, shards and groups are laid."""

from collections.abc import Callable, Sequence

import pytest
from transformers import LlamaForCausalLM

from pannier.slicer import SlicedModel
from pannier.wire import messages as m

from .rig import HeldLink, Plan, Stack, Text, accept, assert_drawn, reference, texts

pytestmark = pytest.mark.timeout(120)
Fill = Callable[[Plan], Plan]


@pytest.mark.parametrize("shards", [(1,), (2,), (3,), (2, 1)], ids=str)
def test_greedy_text_of_the_uncut_model(whole: LlamaForCausalLM, sliced: SlicedModel, shards: Sequence[int]) -> None:
    """Chunked prompts beside decode rows, over shards and groups: the tokens and log-probabilities of transformers."""
    stack = Stack(sliced, shards=shards)
    a, b, c = texts([11, 6, 3], seed=1, groups=len(shards))
    plans: list[Fill] = [
        lambda step: step.chunk(a, 4),
        lambda step: step.last_chunk(a).last_chunk(c),
        lambda step: step.decode(a).decode(c).chunk(b, 5),
        lambda step: step.decode(a).decode(c).last_chunk(b),
        *[lambda step: step.decode(a).decode(c).decode(b)] * 3,
    ]
    for plan in plans:
        (done,) = stack.run(plan(stack.step()).made())
        for drawn in done.drawn:
            text = (a, b, c)[drawn.sequence]
            assert_drawn(whole, text.tokens, drawn)
            accept(text, drawn)
    assert [len(text.tokens) for text in (a, b, c)] == [17, 10, 9]


def test_the_comparison_can_fail(whole: LlamaForCausalLM, sliced: SlicedModel) -> None:
    """With its past withheld the model says something else, so the tests here test something."""
    (text,) = texts([12], seed=1)
    assert (reference(whole, text.tokens) - reference(whole, text.tokens[-1:])).abs().max() > 0.1
    assert sliced.calls


def test_two_lanes_at_once(whole: LlamaForCausalLM, sliced: SlicedModel) -> None:
    """While one lane waits for its answers the other computes; each gets its own text."""
    stack = Stack(sliced, shards=(2,), wrap=HeldLink)
    lanes = texts([9, 7], seed=2)
    for _ in range(3):
        for lane, text in enumerate(lanes):
            plan = stack.step(lane)
            stack.send((plan.decode(text) if text.stored else plan.last_chunk(text)).made())
        links = [stack.link("a0.0"), stack.link("a0.1")]
        stack.pump()
        if lanes[0].tokens[9:]:
            under_way = {message.lane for message in links[0].sent if isinstance(message, m.Piece)}
            assert under_way == {0, 1}
        while sum(link.let_through(1) for link in links):
            stack.pump()
        for done in sorted(stack.take(m.StepDone, 2), key=lambda done: done.lane):
            text = lanes[done.lane]
            assert_drawn(whole, text.tokens, done.drawn[0])
            accept(text, done.drawn[0])


def test_tokens_of_the_step_before(whole: LlamaForCausalLM, sliced: SlicedModel) -> None:
    """A step planned ahead takes the tokens that the one before it draws, each where it is meant to go."""
    stack = Stack(sliced)
    a, b = texts([5, 8], seed=3)
    first = stack.step().last_chunk(a).last_chunk(b).made()
    second = stack.step().decode_previous(b, first, 1).decode_previous(a, first, 0).made()
    third = stack.step().decode_previous(a, second, 1).made()
    done = stack.run(first, second, third)
    for text, place in ((a, 0), (b, 1)):
        accept(text, done[0].drawn[place])
    for text, place in ((b, 0), (a, 1)):
        assert_drawn(whole, text.tokens, done[1].drawn[place])
        accept(text, done[1].drawn[place])
    assert_drawn(whole, a.tokens, done[2].drawn[0])


def test_tokens_of_another_step_are_refused(sliced: SlicedModel) -> None:
    """A token that is not of the lane's last step can't be had: the step fails and says so."""
    stack = Stack(sliced)
    a, b = texts([5, 5])
    first, second = stack.step().last_chunk(a).made(), stack.step().last_chunk(b).made()
    stack.run(first, second)
    stack.send(stack.step().decode_previous(a, first, 0).made())
    stack.pump()
    (failed,) = stack.take(m.StepFailed)
    assert "needs tokens of step 1, which is not the last" in failed.reason


def test_several_samples_of_one_row(whole: LlamaForCausalLM, sliced: SlicedModel) -> None:
    """A row may be sampled for several sequences; rows between are not sampled at all."""
    stack = Stack(sliced)
    a, b = texts([6, 7], seed=4)
    twin = Text(7, a.tokens, a.blocks, stored=6)
    (done,) = stack.run(stack.step().last_chunk(a).sample(twin).chunk(b, 7).made())
    assert [drawn.sequence for drawn in done.drawn] == [0, 7]
    for drawn in done.drawn:
        assert_drawn(whole, a.tokens, drawn)


@pytest.mark.parametrize("border", [4, 9])
def test_a_sequence_over_two_groups(whole: LlamaForCausalLM, sliced: SlicedModel, border: int) -> None:
    """Its first part lies in one group, the rest in another; chunk rows and decode rows attend to both."""
    stack = Stack(sliced, shards=(2, 1))
    head, other = texts([border + 7, 5], seed=5)
    tail = Text(0, list(head.tokens), [3, 1, 4, 5], group=1, stored=border, first_position=border)
    stack.run(stack.step().chunk(head, border).made())
    plans: list[Fill] = [
        lambda step: step.chunk(tail, 4).read(head),
        lambda step: step.chunk(tail, 3).sample(tail).read(head),
        lambda step: step.decode(tail).read(head).last_chunk(other),
        lambda step: step.decode(tail).read(head).decode(other),
    ]
    for plan in plans:
        (done,) = stack.run(plan(stack.step()).made())
        for drawn in done.drawn:
            text = tail if drawn.sequence == 0 else other
            assert_drawn(whole, text.tokens, drawn)
            accept(text, drawn)
    assert (len(tail.tokens), len(other.tokens)) == (border + 10, 7)
