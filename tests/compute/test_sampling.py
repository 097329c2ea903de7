"""Draws: the best token, or one with the right probability; a function of seed, index and position only."""

import json
from collections.abc import Sequence
from itertools import pairwise

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pannier.compute.sampling import CannotDraw, State, draw, reference, report_drawn
from pannier.compute.sampling.noise import bits, exponentials
from pannier.compute.sampling.race import keys_of
from pannier.wire import messages as m

from .draws import NO_MASKS, far_off, sample, tokens

pytestmark = pytest.mark.timeout(120)
V = 8
LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0, -6.0])
GREEDY = m.Filters()


def test_greedy_is_the_most_likely_token() -> None:
    """Temperature 0 takes the best logit, whatever seed and filters, in half precision as well."""
    rows = torch.randn(20, 50, generator=torch.Generator().manual_seed(0))
    samples = [sample(i, m.Filters(0.0, 3, 0.5, 0.1), seed=i) for i in range(20)]
    for dtype in (torch.float32, torch.bfloat16):
        assert tokens(samples, rows.to(dtype)) == rows.to(dtype).argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-45, 1e-300])
def test_a_temperature_near_0_is_greedy(temperature: float) -> None:
    """However many logits it would make infinite."""
    logits = torch.tensor([1.0, 2.0, 30.0, 3.0])
    assert tokens([sample(position, m.Filters(temperature)) for position in range(50)], logits) == [2] * 50


@pytest.mark.parametrize("temperature", [1e30, 1e300, float("inf")])
def test_a_huge_temperature_makes_all_alike(temperature: float) -> None:
    """But for what can't be drawn."""
    logits = torch.tensor([1.0, -torch.inf, 30.0, 3.0])
    drawn = tokens([sample(position, m.Filters(temperature)) for position in range(3000)], logits)
    assert far_off(drawn, torch.tensor([1 / 3, 0, 1 / 3, 1 / 3])) < 4


@pytest.mark.parametrize("top_p", [1e-30, 1e-45, 1e-300])
def test_a_top_p_near_0_is_greedy(top_p: float) -> None:
    """However much less than fp32 can tell from 0."""
    assert tokens([sample(position, m.Filters(1.0, 0, top_p)) for position in range(50)], LOGITS) == [0] * 50


def test_nothing_to_draw() -> None:
    """A step without samples draws nothing."""
    assert draw(torch.empty(0, V), [], [], [], NO_MASKS).tolist() == []
    assert report_drawn(torch.empty(0, V), [], [], []) == ()


def test_a_draw_depends_on_seed_index_and_position_only() -> None:
    """The same whichever samples are drawn beside it, in whatever order, for whatever sequence."""
    samples = [
        sample(position, seed=seed, index=index) for seed in range(3) for index in range(4) for position in range(5)
    ]
    alone = [tokens([one], LOGITS)[0] for one in samples]
    assert tokens(samples, LOGITS) == alone
    assert tokens(samples[::-1], LOGITS) == alone[::-1]
    others = [msgspec.structs.replace(one, sequence=99, top_logprobs=3) for one in samples]
    assert tokens(others, LOGITS) == alone


KINDS = [
    m.Filters(), m.Filters(0.7), m.Filters(1.0, 5), m.Filters(1.3, 0, 0.8), m.Filters(1.0, 0, 1.0, 0.05),
    m.Filters(0.9, 40, 0.9, 0.01), m.Filters(2.0, 0, 0.2), m.Filters(1.0, 1000, 0.999),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_alone_and_in_a_batch_of_32(dtype: torch.dtype) -> None:
    """Each with its own logits, filters, seed and rules: the same token."""
    generator = torch.Generator().manual_seed(5)
    logits = (torch.randn(32, 3000, generator=generator) * 3).to(dtype)
    rules = m.SamplerRules(m.Penalties(1.3, 0.5, 0.2), ((7, 2.0),), ((5,),), 9, (1, 2))
    for position in range(20):
        samples = [sample(position, KINDS[i % len(KINDS)], seed=i, index=i % 3) for i in range(32)]
        states = [State(m.SamplerState(i, rules, tuple(range(i * 9)), (i, i, 3))) if i % 2 else None for i in range(32)]
        together = tokens(samples, logits, states)
        alone = [tokens([samples[i]], logits[i], [states[i]])[0] for i in range(32)]
        assert together == alone


def test_one_row_for_many_samples() -> None:
    """Samples that share a row draw what they would from rows of their own."""
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(1))
    rows = [0, 2, 2, 1, 0, 0, 2]
    samples = [sample(9, KINDS[i], index=i) for i in range(7)]
    shared = draw(logits, rows, samples, [None] * 7, NO_MASKS)
    assert shared.tolist() == tokens(samples, logits[rows])


def test_global_random_state_has_no_part_in_it() -> None:
    """Neither is it read nor is it changed."""
    samples = [sample(position) for position in range(50)]
    torch.manual_seed(1)
    first, state = tokens(samples, LOGITS), torch.get_rng_state()
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(2)
    assert tokens(samples, LOGITS) == first


@pytest.mark.parametrize(
    "seeds", [(0, 1), (5, 5 + 2**32), (7, 7 + 2**62), (1, 2**63 - 1), (3, -3), (4, 4 + 2**63)], ids=str
)
def test_other_seeds_give_other_draws(seeds: tuple[int, int]) -> None:
    """All of a seed counts, and so does the position."""
    one, other = (tokens([sample(position, seed=seed) for position in range(100)], LOGITS) for seed in seeds)
    assert sum(a == b for a, b in zip(one, other, strict=True)) < 60
    assert len(set(one)) > 3


FILTERS = {
    "temperature 1": m.Filters(1.0),
    "temperature 0.5": m.Filters(0.5),
    "temperature 2": m.Filters(2.0),
    "top_k": m.Filters(1.0, 7),
    "top_k 1": m.Filters(1.0, 1),
    "top_k of all": m.Filters(1.0, 1000),
    "top_p": m.Filters(1.2, 0, 0.8),
    "top_p next to nothing": m.Filters(1.0, 0, 1e-6),
    "top_p small": m.Filters(3.0, 0, 0.2),
    "top_p next to all": m.Filters(1.0, 0, 0.9999),
    "min_p": m.Filters(1.5, 0, 1.0, 0.1),
    "min_p 1": m.Filters(1.5, 0, 1.0, 1.0),
    "top_k and top_p": m.Filters(1.5, 9, 0.7),
    "min_p and top_p": m.Filters(2.0, 0, 0.6, 0.2),
    "all": m.Filters(1.8, 12, 0.9, 0.15),
}


@pytest.mark.slow
@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS)
def test_distribution(filters: m.Filters) -> None:
    """100,000 draws over seeds, indices and positions come with the probabilities of the plain reference."""
    logits = torch.randn(40, generator=torch.Generator().manual_seed(2)) * 2
    logits[11] = logits[3]  # ties
    logits[12] = logits[logits.argmax()]
    logits[20] = -torch.inf
    samples = [sample(i % 1000, filters, seed=i // 4000, index=i // 1000 % 4) for i in range(100_000)]
    expected = torch.tensor(reference.probabilities(logits.tolist(), filters))
    assert far_off(tokens(samples, logits), expected) < 4


@pytest.mark.slow
def test_the_chi_square_can_fail() -> None:
    """A temperature that is 2 % off is found out."""
    samples = [sample(i, m.Filters(1.02)) for i in range(100_000)]
    assert far_off(tokens(samples, LOGITS), LOGITS.softmax(-1)) > 4


@pytest.mark.slow
@pytest.mark.parametrize("along", ["position", "seed", "index"])
def test_neighbouring_draws_are_independent(along: str) -> None:
    """Pairs of consecutive positions, seeds and indices come with the product of their probabilities."""
    logits = torch.tensor([0.5, 0.0, -0.5])
    p = logits.softmax(-1)
    line = [msgspec.structs.replace(sample(), **{along: n}) for n in range(100_001)]
    pairs = [3 * a + b for a, b in pairwise(tokens(line, logits))]
    assert far_off(pairs, torch.outer(p, p).flatten()) < 4


@pytest.mark.slow
def test_a_large_vocabulary_is_drawn_evenly() -> None:
    """Of 1,000 equally likely tokens each comes as often, and so does each range of them."""
    drawn = tokens([sample(n, seed=n % 7) for n in range(100_000)], torch.zeros(1000))
    assert far_off(drawn, torch.full((1000,), 1 / 1000)) < 4
    assert far_off([token // 50 for token in drawn], torch.full((20,), 1 / 20)) < 4


def test_the_bits_are_random() -> None:
    """Each is set half of the time; and half of the time it differs from the next token's, and from that of the same
    token where any bit of a seed or position is another, or the samples' keys have a half in common."""
    numbers = range(64)
    keys = keys_of([sample(n, seed=n % 5) for n in numbers])
    found = bits(keys, 4096)
    half = keys_of([sample(n, seed=9) for n in numbers])
    others = {
        "zero": torch.zeros_like(found),
        "next token": bits(keys, 4097)[:, 1:],
        "first half": bits(torch.stack([keys[:, 0], half[:, 1]], 1), 4096),
        "second half": bits(torch.stack([half[:, 0], keys[:, 1]], 1), 4096),
        **{f"position {b}": bits(keys_of([sample(n ^ 1 << b, seed=n % 5) for n in numbers]), 4096) for b in range(20)},
        **{f"seed {b}": bits(keys_of([sample(n, seed=n % 5 ^ 1 << b) for n in numbers]), 4096) for b in range(64)},
    }
    for name, words in others.items():
        for bit in range(31):
            share = float(((found ^ words) >> bit & 1).double().mean())
            assert abs(share - 0.5) < 0.01, (name, bit, share)  # 10 standard deviations


def test_clocks_are_finite() -> None:
    """None is 0 or infinite, whatever the bits: else a token that can't be drawn could win, or none could."""
    clocks = exponentials(keys_of([sample(n) for n in range(200)]), 50_000)
    assert float(clocks.min()) > 0
    assert float(clocks.max()) < 23
    assert float(clocks.double().mean()) == pytest.approx(1, abs=2e-3)


@settings(max_examples=100, deadline=None)
@given(
    count=st.integers(2, 40),
    filters=st.builds(
        m.Filters,
        temperature=st.sampled_from([0.0, 0.57, 1.0, 1.9]),
        top_k=st.integers(0, 45),
        top_p=st.sampled_from([0.03, 0.31, 0.77, 0.97, 1.0, 1.0]),
        min_p=st.sampled_from([0.0, 0.0, 0.013, 0.21, 1.0]),
    ),
    seed=st.integers(0, 2**64 - 1),
    index=st.integers(0, 9),
    position=st.integers(0, 10**6),
)
def test_the_reference_draws_the_same(count: int, filters: m.Filters, seed: int, index: int, position: int) -> None:
    """Token for token, ties and all."""
    generator = torch.Generator().manual_seed(position)
    logits = torch.randint(-4, 5, (20, count), generator=generator) / 2  # many are equal
    samples = [sample(position + i, filters, seed=seed, index=index) for i in range(20)]
    wanted = [reference.draw(row, one) for row, one in zip(logits.tolist(), samples, strict=True)]
    assert tokens(samples, logits) == wanted


def test_nothing_left_names_the_sequence() -> None:
    """Greedy or drawn, a sample without a token is an error rather than some token."""
    rules = m.SamplerRules(bad_words=tuple((token,) for token in range(V)))
    for filters in (GREEDY, m.Filters(1.0)):
        samples = [sample(0, filters), sample(0, filters, sequence=77)]
        states: Sequence[State | None] = [None, State(m.SamplerState(77, rules, (), ()))]
        with pytest.raises(CannotDraw, match="sequence 77: its mask and rules leave no token"):
            tokens(samples, LOGITS, states)


def test_logits_that_are_no_numbers_end() -> None:
    """A broken model gives some token: no endless search, no exception."""
    logits = torch.full((V,), torch.nan)
    assert 0 <= tokens([sample(0, m.Filters(1.0, 3, 0.5, 0.1))], logits)[0] < V


def test_log_probabilities_are_the_models_own() -> None:
    """Before temperature and filters; the most likely first; the drawn token's own, be it among them or not."""
    expected = LOGITS.log_softmax(-1)
    samples = [sample(position, m.Filters(2.0, 6), top=3) for position in range(40)]
    reported = report_drawn(LOGITS[None], [0] * 40, samples, tokens(samples, LOGITS))
    for drawn in reported:
        assert [top.token for top in drawn.top] == [0, 1, 2]
        assert [top.logprob for top in drawn.top] == pytest.approx(expected[:3].tolist())
        assert drawn.logprob == pytest.approx(float(expected[drawn.token]))
    assert {drawn.token for drawn in reported} - {0, 1, 2}
    json.dumps(msgspec.to_builtins(reported), allow_nan=False)


def test_as_many_log_probabilities_as_asked_for() -> None:
    """None at all, the drawn token's only, some, or as many as there are tokens; sample by sample."""
    samples = [sample(i, top=top) for i, top in enumerate((-1, 0, 5, 20))]
    reported = report_drawn(LOGITS[None], [0] * 4, samples, [1, 2, 3, 4])
    assert [drawn.logprob is None for drawn in reported] == [True, False, False, False]
    assert [len(drawn.top) for drawn in reported] == [0, 0, 5, V]
    assert [drawn.token for drawn in reported] == [1, 2, 3, 4]
