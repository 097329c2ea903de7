"""Steps whose draws need a past: states are sent once, go on by themselves, and are asked for when they are lacking."""

from collections.abc import Sequence

import pytest
import torch
from transformers import LlamaForCausalLM

from pannier.compute.sampling import reference
from pannier.slicer import SlicedModel
from pannier.wire import messages as m

from .rig import LIFE, MadeStep, Plan, Stack, Text, accept, texts
from .rig import reference as logprobs_of

pytestmark = pytest.mark.timeout(120)
RULES = m.SamplerRules(m.Penalties(1.5, 0.4, 0.3), ((5, 1.0),), ((7,), (1, 2)), 3, (0,))
FILTERS = m.Filters(1.2, 40, 0.95, 0.001)
N = 4
PROMPT = 6


def state_of(text: Text) -> m.SamplerState:
    return m.SamplerState(text.sequence, RULES, tuple(text.tokens[:PROMPT]), tuple(text.tokens[PROMPT:]))


def version_of(text: Text) -> int:
    return len(text.tokens) - PROMPT + 1


def outputs_of() -> list[Text]:
    """One prompt's N outputs, each with blocks of its own."""
    prompt, *rest, _ = texts([PROMPT] * (N + 1), seed=8)
    return [prompt, *[Text(10 + i, list(prompt.tokens), text.blocks) for i, text in enumerate(rest)]]


def stranger() -> Text:
    """Another text with blocks of its own."""
    return texts([PROMPT] * (N + 1), seed=8)[-1]


def decode(plan: Plan, outputs: Sequence[Text], **also: int) -> Plan:
    for index, text in enumerate(outputs):
        plan.decode(text, filters=FILTERS, seed=3, index=index, version=version_of(text) - also.get("ago", 0))
    return plan


def prefill(plan: Plan, outputs: Sequence[Text]) -> Plan:
    for index, text in enumerate(outputs):
        plan.last_chunk(text, filters=FILTERS, seed=3, index=index, version=1)
    return plan


def take_in(outputs: Sequence[Text], done: m.StepDone) -> list[int]:
    for text, drawn in zip(outputs, done.drawn, strict=True):
        accept(text, drawn)
    return [drawn.token for drawn in done.drawn]


def expected(whole: LlamaForCausalLM, text: Text, index: int) -> int:
    """By the reference, from the uncut model."""
    sample = m.Sample(0, 0, len(text.tokens), index, 3, FILTERS, 0, 1, -1)
    return reference.draw(logits_of(whole, text.tokens), sample, state_of(text))


def logits_of(whole: LlamaForCausalLM, tokens: Sequence[int]) -> list[float]:
    logits: list[float] = whole(torch.tensor([tokens])).logits[0, -1].tolist()
    return logits


def test_states_are_sent_once(whole: LlamaForCausalLM, sliced: SlicedModel) -> None:
    """The worker appends what it draws; each output is its own. The tokens are the reference's."""
    stack = Stack(sliced)
    outputs = outputs_of()
    plan = prefill(stack.step(), outputs).state(*map(state_of, outputs))
    for _ in range(8):
        (done,) = stack.run(plan.made())
        wanted = [expected(whole, text, index) for index, text in enumerate(outputs)]
        assert take_in(outputs, done) == wanted
        plan = decode(stack.step(), outputs)
    assert len({tuple(text.tokens) for text in outputs}) == N


def test_a_step_repeated_on_another_worker(sliced: SlicedModel) -> None:
    """With penalties, seeds and n = 4: what one worker drew, a fresh one draws when it is sent the states."""
    first = Stack(sliced)
    outputs = outputs_of()
    (done,) = first.run(prefill(first.step(), outputs).state(*map(state_of, outputs)).made())
    for _ in range(5):
        take_in(outputs, done)
        other = Stack(sliced)
        copies = [Text(text.sequence, list(text.tokens), text.blocks) for text in outputs]
        for text in copies:
            other.run(other.step().chunk(text, len(text.tokens) - 1).made())
        (done,) = first.run(decode(first.step(), outputs).made())
        (again,) = other.run(decode(other.step(), copies).state(*map(state_of, copies)).made())
        assert [drawn.token for drawn in again.drawn] == [drawn.token for drawn in done.drawn]


def test_the_step_planned_ahead_sees_the_token_before(whole: LlamaForCausalLM, sliced: SlicedModel) -> None:
    """Its draws are penalised for tokens that the gateway didn't know when it planned."""
    stack = Stack(sliced)
    outputs = outputs_of()
    steps = [prefill(stack.step(), outputs).state(*map(state_of, outputs)).made()]
    for version in (2, 3, 4):
        plan = stack.step()
        for index, text in enumerate(outputs):
            plan.decode_previous(text, steps[-1], index, filters=FILTERS, seed=3, index=index, version=version)
        steps.append(plan.made())
    for done in stack.run(*steps):
        wanted = [expected(whole, text, index) for index, text in enumerate(outputs)]
        assert take_in(outputs, done) == wanted


def again_with(step: MadeStep, *states: m.SamplerState) -> MadeStep:
    fields = {name: getattr(step.message, name) for name in step.message.__struct_fields__}
    return MadeStep(m.Step(**{**fields, "states": states}), step.tensors)


def test_need_state(whole: LlamaForCausalLM, sliced: SlicedModel) -> None:
    """A worker names the states that it lacks; the lane waits for them, with what is queued behind; others go on."""
    stack = Stack(sliced)
    outputs = outputs_of()
    first = prefill(stack.step(), outputs).state(state_of(outputs[1])).made()
    behind = stack.step()
    for index, text in enumerate(outputs):
        behind.decode_previous(text, first, index, filters=FILTERS, seed=3, index=index, version=2)
    second = behind.made()
    for step in (first, second, stack.step(lane=1).chunk(stranger(), 3).made()):
        stack.send(step)
    stack.pump()
    assert stack.replies.pop(0) == m.NeedState(LIFE, 1, first.message.step, 0, (0, 11, 12))
    assert stack.take(m.StepDone)[0].lane == 1
    stack.send(again_with(first, *(state_of(outputs[i]) for i in (0, 2))))
    stack.pump()
    (need,) = stack.take(m.NeedState)
    assert need.sequences == (12,)
    stack.send(again_with(first, state_of(outputs[3])))
    stack.pump()
    for done in stack.take(m.StepDone, 2):
        wanted = [expected(whole, text, index) for index, text in enumerate(outputs)]
        assert take_in(outputs, done) == wanted


def test_a_new_session_forgets_states(sliced: SlicedModel) -> None:
    """So the gateway needn't know what a worker has been told in a session that was fenced."""
    stack = Stack(sliced)
    outputs = outputs_of()
    (done,) = stack.run(prefill(stack.step(), outputs).state(*map(state_of, outputs)).made())
    take_in(outputs, done)
    stack.new_session()
    stack.send(decode(stack.step(), outputs).made())
    stack.pump()
    assert stack.take(m.NeedState)[0].sequences == (0, 10, 11, 12)


@pytest.mark.parametrize("aborted", [0, 1])
def test_a_waiting_step_is_aborted(whole: LlamaForCausalLM, sliced: SlicedModel, aborted: int) -> None:
    """It, or only what is behind it: the lane waits for it no more, or still does."""
    stack = Stack(sliced)
    outputs = outputs_of()
    first = prefill(stack.step(), outputs).made()
    second = stack.step().chunk(stranger(), 3).made()
    for step in (first, second):
        stack.send(step)
    stack.pump()
    stack.take(m.NeedState)
    stack.core.obey(m.AbortStep(LIFE, 1, (first, second)[aborted].message.step, 0), [])
    stack.pump()
    stack.take(m.StepAborted)
    for text in outputs:
        text.stored = 0
    last = first if aborted else prefill(stack.step(), outputs).made()
    (done,) = stack.run(again_with(last, *map(state_of, outputs)))
    wanted = [expected(whole, text, index) for index, text in enumerate(outputs)]
    assert take_in(outputs, done) == wanted


def test_a_repeated_step_cuts_its_states_back(sliced: SlicedModel) -> None:
    """Whoever repeats a step that was drawn needn't send states again: the same tokens are drawn."""
    stack = Stack(sliced)
    outputs = outputs_of()
    (done,) = stack.run(prefill(stack.step(), outputs).state(*map(state_of, outputs)).made())
    take_in(outputs, done)
    drawn = []
    for _ in range(3):
        (done,) = stack.run(decode(stack.step(), outputs).made())
        drawn.append([one.token for one in done.drawn])
        for text in outputs:
            text.stored -= 1
    assert drawn[0] == drawn[1] == drawn[2]


def test_a_mask_leaves_what_it_allows(whole: LlamaForCausalLM, sliced: SlicedModel) -> None:
    """The best of the allowed tokens; log-probabilities stay the model's own."""
    stack = Stack(sliced)
    (text,) = texts([9])
    plan = stack.step().last_chunk(text, mask=0)
    plan.masks = [[0, 1 << 5 | 1 << 9, 0]]
    (done,) = stack.run(plan.made())
    own = logprobs_of(whole, text.tokens)
    assert done.drawn[0].token == max((37, 41), key=lambda token: float(own[token]))
    assert done.drawn[0].top[0].token == int(own.argmax())
    assert done.drawn[0].logprob == pytest.approx(float(own[done.drawn[0].token]), abs=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_mask_that_leaves_nothing_fails_its_step(sliced: SlicedModel, temperature: float) -> None:
    """The failure names the sequence."""
    stack = Stack(sliced)
    a, b = texts([9, 5])
    plan = stack.step().last_chunk(a).last_chunk(b, filters=m.Filters(temperature), mask=0)
    plan.masks = [[0, 0, 0]]
    stack.send(plan.made())
    stack.pump()
    (failed,) = stack.take(m.StepFailed)
    assert failed.reason == "sequence 1: its mask and rules leave no token to draw"


def test_masks_that_do_not_fit_fail_their_step(sliced: SlicedModel) -> None:
    """Too few masks, or too short ones: a clear failure before anything runs."""
    stack = Stack(sliced)
    for mask, words in ((1, [[-1] * 3]), (0, [[-1] * 2])):
        (text,) = texts([9])
        plan = stack.step().last_chunk(text, mask=mask)
        plan.masks = words
        stack.send(plan.made())
        stack.pump()
        assert f"too few for mask {mask}" in stack.take(m.StepFailed)[0].reason
        stack.new_session()


def test_a_step_of_other_parts_fails(sliced: SlicedModel) -> None:
    """Four parts there are, always."""
    stack = Stack(sliced)
    (text,) = texts([9])
    made = stack.step().last_chunk(text).made()
    stack.send(MadeStep(made.message, [*made.tensors[:2]]))
    stack.pump()
    assert "has 2 parts instead of 4" in stack.take(m.StepFailed)[0].reason


def test_the_reference_is_another_text(whole: LlamaForCausalLM) -> None:
    """Penalties change what is drawn here, so the tests here test something."""
    (text,) = texts([PROMPT], seed=8)
    with_rules, without = list(text.tokens), list(text.tokens)
    for tokens in (with_rules, without):
        for _ in range(8):
            state = state_of(Text(0, tokens, [])) if tokens is with_rules else None
            sample = m.Sample(0, 0, len(tokens), 0, 3, FILTERS, 0, 1, -1)
            tokens.append(reference.draw(logits_of(whole, tokens), sample, state))
    assert with_rules != without
    assert torch.is_inference_mode_enabled()
