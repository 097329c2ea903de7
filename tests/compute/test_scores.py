"""Scores: how likely the uncut model finds a prompt's own tokens."""

import pytest
import torch
from transformers import LlamaForCausalLM

from pannier.compute import scores
from pannier.slicer import SlicedModel
from pannier.wire import messages as m

from .rig import Stack, Text, assert_drawn, texts

pytestmark = pytest.mark.timeout(120)


def assert_scored(whole: LlamaForCausalLM, text: Text, scored: m.Scored, top: int) -> None:
    """Each token with log_softmax of the uncut model's logits, and the most likely ones beside it."""
    logprobs = whole(torch.tensor([text.tokens])).logits[0].log_softmax(-1)
    assert scored.sequence == text.sequence
    for position, one in enumerate(scored.tokens, scored.position):
        expected = logprobs[position - 1]
        assert one.token == text.tokens[position]
        assert one.logprob == pytest.approx(float(expected[one.token]), abs=1e-4)
        values, indices = expected.topk(top)
        assert [likely.token for likely in one.top] == indices.tolist()
        assert [likely.logprob for likely in one.top] == pytest.approx(values.tolist(), abs=1e-4)


@pytest.mark.parametrize("elements", [1, 96 * 4, 1 << 20], ids=["a row at a time", "4 rows at a time", "at once"])
def test_scores_are_those_of_the_uncut_model(
    whole: LlamaForCausalLM, sliced: SlicedModel, monkeypatch: pytest.MonkeyPatch, elements: int
) -> None:
    """Over chunks and beside decode rows and samples, however few rows the head is run for at once."""
    monkeypatch.setattr(scores, "HEAD_ELEMENTS", elements)
    stack = Stack(sliced, shards=(2,))
    a, b, c = texts([14, 9, 5], seed=6)
    stack.run(stack.step().last_chunk(c).made())
    c.tokens.append(7)
    first = stack.step().decode(c).chunk(a, 8).score(a, 8)
    second = stack.step().last_chunk(a).score(a, 5).chunk(b, 7).score(b, 7, top=2)
    done = stack.run(first.made(), second.made())
    assert_scored(whole, a, done[0].scored[0], 20)
    assert_scored(whole, a, done[1].scored[0], 20)
    assert_scored(whole, b, done[1].scored[1], 2)
    assert [len(one.tokens) for one in done[1].scored] == [5, 7]
    assert [scored.position for scored in (*done[0].scored, *done[1].scored)] == [1, 9, 1]
    assert_drawn(whole, a.tokens, done[1].drawn[0])
    assert_drawn(whole, c.tokens, done[0].drawn[0])


def test_only_the_tokens_own(whole: LlamaForCausalLM, sliced: SlicedModel) -> None:
    """No others, if none are asked for."""
    stack = Stack(sliced)
    (text,) = texts([6])
    (done,) = stack.run(stack.step().chunk(text, 5).score(text, 5, top=0).made())
    assert_scored(whole, text, done.scored[0], 0)
    assert len(done.scored[0].tokens) == 5
    assert done.drawn == ()


@pytest.mark.parametrize("spoilt", [[], [96] * 5, [-1] * 5], ids=["missing", "too large", "negative"])
def test_tokens_that_cannot_be_scored(sliced: SlicedModel, spoilt: list[int]) -> None:
    """The step fails and says why."""
    stack = Stack(sliced)
    (text,) = texts([6])
    plan = stack.step().chunk(text, 5).score(text, 5)
    plan.scored = spoilt
    stack.send(plan.made())
    stack.pump()
    assert "a score names tokens that are not among" in stack.take(m.StepFailed)[0].reason
