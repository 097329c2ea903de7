"""Masks, bans, biases and penalties are those of the plain reference, however a state came to be."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pannier.compute.sampling import SamplerStates, State, reference
from pannier.compute.sampling.rules import apply_rules
from pannier.wire import WireError
from pannier.wire import messages as m

from .draws import NO_MASKS, sample, tokens

V = 40
token = st.integers(0, V - 1)
few = st.integers(0, 5)  # so that outputs and bad words meet
tuples = st.lists(token, max_size=30).map(tuple)
numbers = st.floats(-2, 2, width=32)
rules = st.builds(
    m.SamplerRules,
    penalties=st.builds(m.Penalties, st.floats(0.5, 2, width=32), numbers, numbers) | st.just(m.Penalties()),
    logit_bias=st.lists(st.tuples(token, numbers), max_size=6).map(tuple),
    bad_words=st.lists(st.lists(few, min_size=1, max_size=3).map(tuple), max_size=6).map(tuple),
    min_tokens=st.integers(0, 12),
    held_tokens=st.lists(token, max_size=3).map(tuple),
)
outputs = st.lists(few | token, max_size=20).map(tuple)
messages = st.builds(m.SamplerState, st.just(7), rules, tuples, outputs)
masks = st.lists(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=2, max_size=2), min_size=1, max_size=3)


def change(logits: torch.Tensor, states: Sequence[State | None], masks: torch.Tensor = NO_MASKS) -> torch.Tensor:
    x = logits.clone()
    apply_rules(x, [sample() for _ in states], states, masks)
    return x


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.none() | messages, min_size=1, max_size=5),
    masks,
    st.lists(st.integers(-1, 2), min_size=5, max_size=5),
    st.integers(0, 1000),
)
def test_the_reference_changes_logits_the_same(
    given_states: list[m.SamplerState | None], words: list[list[int]], mask_of: list[int], seed: int
) -> None:
    """Rows with and without states and masks, side by side."""
    x = torch.randn(len(given_states), V, generator=torch.Generator().manual_seed(seed)) * 4
    before = x.tolist()
    numbers = [min(mask, len(words) - 1) for mask in mask_of[: len(given_states)]]
    states = [None if state is None else State(state) for state in given_states]
    apply_rules(x, [sample(mask=number) for number in numbers], states, torch.tensor(words, dtype=torch.int32))
    for row, logits, state, number in zip(x, before, given_states, numbers, strict=True):
        mask = None if number < 0 else [word % 2**32 for word in words[number]]
        expected = torch.tensor(reference.change(logits, state, mask))
        torch.testing.assert_close(row, expected, rtol=1e-5, atol=1e-4)


@settings(max_examples=200, deadline=None)
@given(messages, st.lists(st.integers(1, 21), max_size=5), st.lists(few | token, max_size=5))
def test_a_state_goes_on_and_back(state: m.SamplerState, versions: list[int], drawn: list[int]) -> None:
    """Appended to and cut back, it does what one that was built from the same tokens does."""
    kept, history = State(state), list(state.output_tokens)
    logits = torch.randn(1, V, generator=torch.Generator().manual_seed(0))
    for version in versions:
        kept.cut_back(version)
        del history[version - 1 :]
        for one in drawn:
            kept.append(one)
            history.append(one)
        assert kept.version == len(history) + 1
        built = State(m.SamplerState(7, state.rules, state.prompt_tokens, tuple(history)))
        torch.testing.assert_close(change(logits, [kept]), change(logits, [built]), rtol=0, atol=0)


def one_rule(rules: m.SamplerRules, prompt: Sequence[int] = (), outputs: Sequence[int] = ()) -> list[float]:
    """What rules make of logits 2, -2, 1, -1 of tokens 0 to 3."""
    state = State(m.SamplerState(0, rules, tuple(prompt), tuple(outputs)))
    changed: list[float] = change(torch.tensor([[2.0, -2.0, 1.0, -1.0]]), [state])[0].tolist()
    return changed


def test_each_rule() -> None:
    """By hand: what a prompt counts for, how often, and in which order rules act."""
    inf = float("inf")
    assert one_rule(m.SamplerRules(m.Penalties(repetition=2.0)), [0], [1, 1]) == [1, -4, 1, -1]
    assert one_rule(m.SamplerRules(m.Penalties(presence=0.5)), [0], [1, 1]) == [2, -2.5, 1, -1]
    assert one_rule(m.SamplerRules(m.Penalties(frequency=0.5)), [0], [1, 1]) == [2, -3, 1, -1]
    assert one_rule(m.SamplerRules(logit_bias=((3, 4.0),))) == [2, -2, 1, 3]
    assert one_rule(m.SamplerRules(m.Penalties(2.0, 0.5, 0.25), ((3, 4.0),)), [], [3, 3]) == [2, -2, 1, 0.5]
    assert one_rule(m.SamplerRules(m.Penalties(2.0), ((3, 99.0),), ((3,),)), [], [3]) == [2, -2, 1, -inf]
    assert one_rule(m.SamplerRules(min_tokens=2, held_tokens=(0, 2)), [], [1]) == [-inf, -2, -inf, -1]
    assert one_rule(m.SamplerRules(min_tokens=2, held_tokens=(0, 2)), [], [1, 1]) == [2, -2, 1, -1]


@pytest.mark.parametrize(
    ("words", "outputs", "banned"),
    [
        (((2,),), (), [2]),
        (((1, 2),), (), []),
        (((1, 2),), (1,), [2]),
        (((1, 2),), (1, 3), []),
        (((3, 1, 2),), (1,), []),
        (((3, 1, 2), (1, 0)), (0, 3, 1), [2, 0]),
        ((), (1,), []),
    ],
)
def test_bad_words(words: tuple[tuple[int, ...], ...], outputs: tuple[int, ...], banned: list[int]) -> None:
    """The last token is banned right behind the others, as output: a prompt's end doesn't count."""
    state = State(m.SamplerState(0, m.SamplerRules(bad_words=words), (1, 1), outputs))
    assert state.banned() == banned


def test_only_allowed_tokens_are_drawn() -> None:
    """Whichever word of the mask they are in; greedy takes the best among them."""
    allowed = [3, 31, 32, 39]
    words = [sum(1 << token for token in (3, 31)) - 2**32, 1 << 7 | 1]
    masks = torch.tensor([[-1, -1], words], dtype=torch.int32)
    logits = torch.arange(float(V))
    for filters, expected in ((m.Filters(30.0), set(allowed)), (m.Filters(), {39})):
        drawn = tokens([sample(n, filters, mask=1) for n in range(300)], logits, masks=masks)
        assert set(drawn) == expected
        free = tokens([sample(n, filters, mask=0) for n in range(300)], logits, masks=masks)
        assert free == tokens([sample(n, filters) for n in range(300)], logits)


def asks(sequence: int, version: int) -> m.Sample:
    return m.Sample(0, sequence, 0, 0, 0, m.Filters(), -1, version, -1)


def test_states_that_are_not_there_are_lacking() -> None:
    """Unknown ones and ones that are behind; each once, and not those of samples that need none."""
    states = SamplerStates(V)
    states.put(m.SamplerState(1, m.SamplerRules(), (), (4, 5)))
    samples = [asks(1, 3), asks(1, 4), asks(1, 4), asks(2, 1), asks(3, 0)]
    assert states.lacking(samples) == (1, 2)
    assert states.lacking([asks(1, 2), asks(3, 0)]) == ()
    kept, none = states.of([asks(1, 2), asks(3, 0)])
    assert kept is not None
    assert (kept.version, none) == (2, None)
    states.clear()
    assert states.lacking([asks(1, 1)]) == (1,)


def test_the_least_recently_used_states_are_forgotten() -> None:
    """So many are kept as a multiple of the largest step's samples, and never fewer than that step needs."""
    states = SamplerStates(V)
    for sequence in range(200):
        states.put(m.SamplerState(sequence, m.SamplerRules(), (), ()))
        assert len(states.of([asks(0, 1), asks(sequence, 1)])) == 2
    kept = [s for s in range(200) if not states.lacking([asks(s, 1)])]
    assert kept == [0, *range(200 - 63, 200)]
    many = [asks(s, 1) for s in range(1000)]
    for sequence in range(1000):
        states.put(m.SamplerState(sequence, m.SamplerRules(), (), ()))
    assert len(states.of(many)) == 1000
    assert states.lacking(many) == ()


@pytest.mark.parametrize(
    "state",
    [
        m.SamplerState(9, m.SamplerRules(), (V,), ()),
        m.SamplerState(9, m.SamplerRules(), (), (V,)),
        m.SamplerState(9, m.SamplerRules(logit_bias=((V, 1.0),)), (), ()),
        m.SamplerState(9, m.SamplerRules(bad_words=((0, V),)), (), ()),
        m.SamplerState(9, m.SamplerRules(held_tokens=(V,)), (), ()),
    ],
)
def test_tokens_outside_the_vocabulary_are_refused(state: m.SamplerState) -> None:
    """Before they become an index."""
    with pytest.raises(WireError, match="sequence 9 names a token outside the vocabulary"):
        SamplerStates(V).put(state)
