import json
from pathlib import Path

import pytest

from pannier.planner.catalogue import load_catalogue
from pannier.planner.check import Check, Outcome
from pannier.planner.devices import IDEAL
from pannier.planner.first_version import FirstVersion
from pannier.planner.lamina import MODELS
from pannier.planner.paper import KV_SHARE, Paper
from pannier.planner.purchase import read_prices
from pannier.planner.trace import TraceRequest
from pannier.runtime.errors import ConfigError

PAPER = Paper.read()
TRACES = {"Azure-Conv": (19366, 1154.7, 211.1), "Kimi-Conv": (12031, 12035.1, 342.6)}


def outcomes(checks: list[Check]) -> dict[str, Outcome]:
    return {check.what: check.outcome for check in checks}


def test_costs_of_all_divisions_are_exact() -> None:
    """Table 5 from table 1; the others are what its prices make of them."""
    found = list(PAPER.costs())
    assert [check.ours for check in found] == [
        *("20.32", "22.12", "40.64", "44.24", "40.64", "44.24"),
        *("26.75", "31.38", "40.64", "59.16", "81.28", "125.52", "88.48"),
    ]
    assert [check.outcome for check in found[:6]] == [Outcome.EXACT] * 6


def test_bytes_of_tokens_and_rows_are_exact() -> None:
    found = outcomes(list(PAPER.bytes()))
    assert list(found.values()) == [*[Outcome.EXACT] * 6, Outcome.REPRODUCED]
    payload = {name: model.sent_bytes + model.returned_bytes for name, model in PAPER.models.items()}
    layers = {"LLaMA-33B": 60, "LLaMA-65B": 80, "LLaMA3-70B": 80}
    assert {name: payload[name] / layers[name] for name in payload} == {
        "LLaMA-33B": 53_248,
        "LLaMA-65B": 65_536,
        "LLaMA3-70B": 36_864,
    }
    assert PAPER.models == MODELS


def test_the_batch_of_the_70b_at_2_4_is_within_5_percent_of_800() -> None:
    assert PAPER.lamina("LLaMA3-70B", "Azure-Conv", (2, 4), IDEAL).room == pytest.approx(800, rel=0.05)


def test_the_mean_batch_ratio_is_within_3_percent_of_2_39() -> None:
    """At the share of memory that is named; at 90 % it is 2.22, and contexts cancel out."""
    assert PAPER.batch_ratio(KV_SHARE) == pytest.approx(2.39, rel=0.03)
    assert PAPER.batch_ratio(0.9) == pytest.approx(2.22, abs=0.005)
    rooms = [
        PAPER.lamina("LLaMA-65B", trace, (2, 4), IDEAL).room / PAPER.vllm("LLaMA-65B", trace, 4, IDEAL).room
        for trace in ("Azure-Conv", "Azure-Code")
    ]
    assert rooms == pytest.approx([0.9 * 384 / (288 - 130.1)] * 2, rel=0.03)


def test_thirty_requests_of_8192_tokens_fill_an_h100() -> None:
    assert 80e9 / (8192 * MODELS["LLaMA3-70B"].kv_bytes) == pytest.approx(30, abs=0.5)


def test_the_bandwidth_that_the_paper_finds_enough_is_enough() -> None:
    assert set(outcomes(list(PAPER.network())).values()) == {Outcome.REPRODUCED}


def test_the_published_gains_are_shown_and_not_claimed() -> None:
    """Where the roofline is ideal on both sides it gives about a fifth in most cells, and a loss in one."""
    gains = {(m, t): PAPER.gain(m, t, IDEAL) for m in PAPER.models for t in PAPER.says["traces"]}
    assert gains["LLaMA3-70B", "Azure-Conv"] == pytest.approx(-0.06, abs=0.01)
    assert gains["LLaMA3-70B", "Azure-Code"] == pytest.approx(0.17, abs=0.01)
    assert sum(0.15 < gain < 0.3 for gain in gains.values()) >= 10
    for check in PAPER.gains():
        assert check.outcome is Outcome.NOT_DERIVABLE
        assert check.published == "+16.1 to +90.1 %"


@pytest.mark.parametrize("name", TRACES)
def test_a_trace_is_known_by_its_number_of_requests(name: str) -> None:
    """Means to the tenth; another trace is said to be none of them."""
    count, prompt, output = TRACES[name]
    requests = [TraceRequest(0.0, int(prompt), int(output))] * count
    found = list(PAPER.trace(requests))
    assert [check.what for check in found][:2] == [f"mean prompt of {name}", f"mean output of {name}"]
    assert {check.outcome for check in found[:2]} == {Outcome.NOT_REPRODUCED}  # the means are whole numbers here
    assert next(PAPER.trace(requests[1:])).outcome is Outcome.NOT_REPRODUCED


def test_bought_cards_cost_their_price_over_years_and_their_power(tmp_path: Path) -> None:
    hourly = read_prices().hourly()
    assert hourly["RTX-3090"] == pytest.approx(1499 / 3 / 8766 + 0.35 * 0.15)
    own = {"years": 5, "usd_per_kwh": 0.3, "cards": [{"name": "H100", "usd_per_hour": 2.5}]}
    (tmp_path / "own.json").write_text(json.dumps(own))
    assert read_prices(tmp_path / "own.json").hourly() == {"H100": 2.5}
    (tmp_path / "own.json").write_text(json.dumps({**own, "cards": [{"name": "H100", "usd": 1}]}))
    with pytest.raises(ConfigError, match="H100 needs usd_per_hour, or usd and watts"):
        read_prices(tmp_path / "own.json").hourly()


def test_press_figures_of_the_first_version_are_marked() -> None:
    """Each reproduced or not, and why: its set-ups aren't known, prices decide what a dollar buys."""
    found = list(FirstVersion.of(PAPER, load_catalogue(), read_prices().hourly()).all())
    assert all(check.why for check in found)
    marks = outcomes(found)
    assert marks["bandwidth per dollar, RTX-3090 of H100"] is Outcome.REPRODUCED
    assert marks["batch, of the homogeneous engine's, LLaMA-33B"] is Outcome.NOT_DERIVABLE
    assert marks["throughput per cost, LLaMA-33B"] is Outcome.NOT_REPRODUCED
