"""Draws: greedy, or with the softmax's probabilities; a function of seed and position only."""

from collections import Counter
from itertools import pairwise

import pytest
import torch

from pannier.compute.sampling import draw
from pannier.wire import messages as m

pytestmark = pytest.mark.timeout(60)
V = 8
LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0, -6.0])


def sample(position: int = 0, *, temperature: float = 1.0, seed: int = 0, top: int = -1, sequence: int = 0) -> m.Sample:
    return m.Sample(0, sequence, position, temperature, seed, top, 0)


def tokens(samples: list[m.Sample], logits: torch.Tensor = LOGITS) -> list[int]:
    """One draw per sample, all from the same logits."""
    drawn, reported = draw(logits.expand(len(samples), -1), samples)
    assert drawn.tolist() == [one.token for one in reported]
    assert drawn.dtype == torch.int64
    listed: list[int] = drawn.tolist()
    return listed


def far_off(counts: Counter[int], probabilities: torch.Tensor) -> float:
    """Chi-square over its degrees of freedom; about 1 if the counts are drawn with these probabilities."""
    total = sum(counts.values())
    expected = (probabilities * total).tolist()
    kept = [i for i, value in enumerate(expected) if value >= 5]
    chi_square: float = sum((counts[i] - expected[i]) ** 2 / expected[i] for i in kept)
    return chi_square / (len(kept) - 1)


def test_greedy_is_the_most_likely_token() -> None:
    """Temperature 0 takes the best logit, whatever the seed, in half precision as well."""
    rows = torch.randn(20, 50, generator=torch.Generator().manual_seed(0))
    samples = [sample(i, temperature=0.0, seed=i) for i in range(20)]
    for dtype in (torch.float32, torch.bfloat16):
        assert draw(rows.to(dtype), samples)[0].tolist() == rows.to(dtype).argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-45, 1e-300])
def test_a_temperature_near_0_is_greedy(temperature: float) -> None:
    """However many logits it would make infinite."""
    logits = torch.tensor([1.0, 2.0, 30.0, 3.0])
    assert tokens([sample(position, temperature=temperature) for position in range(50)], logits) == [2] * 50


def test_nothing_to_draw() -> None:
    """A step without samples draws nothing."""
    drawn, reported = draw(torch.empty(0, V), [])
    assert (drawn.tolist(), reported) == ([], ())


def test_a_draw_depends_on_seed_and_position_only() -> None:
    """The same whichever samples are drawn beside it, in whatever order, for whatever sequence."""
    samples = [sample(position, seed=seed) for seed in range(6) for position in range(10)]
    alone = [tokens([one])[0] for one in samples]
    assert tokens(samples) == alone
    assert tokens(samples[::-1]) == alone[::-1]
    others = [m.Sample(0, 99, one.position, one.temperature, one.seed, 3, 0) for one in samples]
    assert tokens(others) == alone


def test_global_random_state_has_no_part_in_it() -> None:
    """Neither is it read nor is it changed."""
    samples = [sample(position) for position in range(50)]
    torch.manual_seed(1)
    first, state = tokens(samples), torch.get_rng_state()
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(2)
    assert tokens(samples) == first


@pytest.mark.parametrize("seeds", [(0, 1), (5, 5 + 2**32), (7, 7 + 2**62), (1, 2**63 - 1)], ids=str)
def test_other_seeds_give_other_draws(seeds: tuple[int, int]) -> None:
    """All of a seed counts, and so does the position."""
    one, other = (tokens([sample(position, seed=seed) for position in range(100)]) for seed in seeds)
    assert sum(a == b for a, b in zip(one, other, strict=True)) < 60
    assert len(set(one)) > 3


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("over", ["positions", "seeds"])
def test_distribution(temperature: float, over: str) -> None:
    """Over positions of one seed, and over seeds at one position, tokens come with the softmax's probabilities."""
    numbers = range(4000)
    samples = [
        sample(n, seed=3, temperature=temperature)
        if over == "positions"
        else sample(3, seed=n, temperature=temperature)
        for n in numbers
    ]
    assert far_off(Counter(tokens(samples)), (LOGITS / temperature).softmax(-1)) < 3.0


def test_neighbouring_draws_are_independent() -> None:
    """Pairs of consecutive positions, and of consecutive seeds, come with the product of their probabilities."""
    logits = torch.tensor([0.5, 0.0, -0.5])
    p = logits.softmax(-1)
    for line in ([sample(n) for n in range(4001)], [sample(0, seed=n) for n in range(4001)]):
        drawn = tokens(line, logits)
        pairs = Counter(3 * a + b for a, b in pairwise(drawn))
        assert far_off(pairs, torch.outer(p, p).flatten()) < 3.0


def test_log_probabilities_are_the_models_own() -> None:
    """Before temperature; the most likely first; the drawn token's own, be it among them or not."""
    expected = LOGITS.log_softmax(-1)
    samples = [sample(position, temperature=2.0, top=3) for position in range(40)]
    _, reported = draw(LOGITS.expand(40, -1), samples)
    for drawn in reported:
        assert [top.token for top in drawn.top] == [0, 1, 2]
        assert [top.logprob for top in drawn.top] == pytest.approx(expected[:3].tolist())
        assert drawn.logprob == pytest.approx(float(expected[drawn.token]))
    assert {drawn.token for drawn in reported} - {0, 1, 2}


def test_as_many_log_probabilities_as_asked_for() -> None:
    """None at all, the drawn token's only, some, or as many as there are tokens; sample by sample."""
    _, reported = draw(LOGITS.expand(4, -1), [sample(i, top=top) for i, top in enumerate((-1, 0, 5, 20))])
    assert [drawn.logprob is None for drawn in reported] == [True, False, False, False]
    assert [len(drawn.top) for drawn in reported] == [0, 0, 5, V]
