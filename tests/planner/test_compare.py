import pytest
from hypothesis import given
from hypothesis import strategies as st

from pannier.planner.compare import CONVERSIONS, Side, lines, ranking, verdict


def side(name: str, speed: float, usd: float | None, share: float | None = None, **more: float) -> Side:
    figures = {"decode_tokens_per_s": speed, **more}
    return Side(name, "e", "c", figures if share is None else figures | {CONVERSIONS: share}, usd)


def test_a_token_costs_what_an_hour_costs_by_the_tokens_of_an_hour() -> None:
    assert side("a", 1000, 3.6).usd_per_mtok == pytest.approx(1.0)
    assert side("a", 1000, None).usd_per_mtok is None
    assert side("a", 1000, None, usd_per_mtok=7.0).usd_per_mtok == 7.0


def test_latency_is_as_found_or_that_of_equal_streams() -> None:
    assert side("a", 100, 1, streams=8).tpot_ms == 80
    assert side("a", 100, 1, streams=8, tpot=3).tpot_ms == 3
    assert side("a", 100, 1).tpot_ms is None


def test_without_conversions_is_amdahls_bound() -> None:
    """Half of the time gone is twice as fast, and what was said of the rest holds no more."""
    bound = side("a", 10, 1, 0.5, tpot=100, kernels=3).without_conversions()
    assert (bound.tokens_per_s, bound.tpot_ms, bound.conversions) == (20, 50, 0)
    assert "kernels" not in bound.figures
    assert side("a", 10, 1).without_conversions().tokens_per_s == 10


def test_figures_of_both_are_set_side_by_side() -> None:
    """The common ones first; the others where both have them; a ratio of nothing is none."""
    found = {line.what: line for line in lines(side("a", 10, 1, 0.5, x=2, y=1), side("b", 20, 2, 0.0, x=3, z=1))}
    assert list(found) == ["throughput", "price", "cost", "conversions", "x"]
    assert found["throughput"].ratio == 2
    assert found["x"].ratio == 1.5
    assert next(iter(lines(side("a", 0, 1), side("b", 1, 1)))).ratio is None


def test_the_ranking_turns_when_conversions_decide_it() -> None:
    """Half as fast at two thirds of the price, and half of the time is conversions."""
    slow, fast = side("slow", 10, 2.0, 0.5), side("fast", 20, 3.0, 0.0)
    assert ranking(slow, fast) == ("fast", "slow")
    assert ranking(slow, fast).turns
    assert verdict(slow, fast).endswith("the ranking turns")
    assert verdict(fast, slow).endswith("the ranking turns")
    assert verdict(side("slow", 10, 2.0, 0.1), fast).endswith("the ranking stays")
    assert "weren't measured" in verdict(side("a", 1, 1), side("b", 2, 1))
    assert "there are no conversions" in verdict(side("a", 1, 1, 0.0), side("b", 2, 1))
    assert "isn't known of both" in verdict(side("a", 1, None), fast)


@given(st.floats(0.1, 1e6), st.floats(0.01, 1e3), st.floats(0, 0.99))
def test_what_conversions_take_never_makes_it_cheaper(speed: float, usd: float, share: float) -> None:
    one = side("a", speed, usd, share)
    assert one.without_conversions().usd_per_mtok <= one.usd_per_mtok * (1 + 1e-9)  # type: ignore[operator]
