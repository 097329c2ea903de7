from dataclasses import replace

import pytest

from pannier.planner.catalogue import load_catalogue
from pannier.planner.mix import Mix
from pannier.planner.offloaded import Wire
from pannier.planner.pairs import Judged, Pairs, judge_pairs, read_pairs
from pannier.planner.search import Question
from tests.planner.engines import MODEL

CATALOGUE = load_catalogue()
FEW = replace(MODEL, name="few")


def judged(question: Question) -> list[Judged]:
    return list(judge_pairs(read_pairs(), CATALOGUE, lambda _, mix: replace(question, mix=mix)))


@pytest.fixture(scope="module")
def found() -> list[Judged]:
    """All of them, with a small model, whose sizes decide nothing here."""
    question = Question(model=MODEL, mix=Mix.equal(1, 1), wire=Wire(flow=10e9 / 8, flows=4), compute_counts=(1, 2))
    return judged(question)


def test_there_are_at_least_ten_pairs_and_each_is_judged(found: list[Judged]) -> None:
    """Both of GPUs and of host memory over PCIe 4.0 and 5.0; with each of the lengths."""
    pairs: Pairs = read_pairs()
    assert len(pairs.pairs) >= 10
    assert {pair.link for pair in pairs.pairs if pair.sockets} == {"PCIe 4.0 x16", "PCIe 5.0 x16"}
    assert len(found) == len(pairs.pairs) * len(pairs.lengths)
    for each in found:
        assert each.verdict.sentence.startswith(("disaggregate", "do not disaggregate"))
        assert each.answer.offloaded is None or "held by" in each.reason


def test_a_network_that_costs_nothing_never_makes_it_worse(found: list[Judged]) -> None:
    for each in found:
        if each.verdict.gain is not None:
            assert each.without_network.gain is not None
            assert each.without_network.gain.product >= each.verdict.gain.product * (1 - 1e-9)


def test_turing_makes_the_pair_use_float16(found: list[Judged]) -> None:
    dtypes = {each.pair.attention: each.dtype for each in found}
    assert dtypes["g5g.xlarge"] == "float16"
    assert dtypes["g6.xlarge"] == "bfloat16"


def test_host_memory_costs_nothing_and_is_shared_by_the_devices(found: list[Judged]) -> None:
    """One instance; two sockets of DDR4-3200 in eight parts, of which attention gets four fifths."""
    host = next(each for each in found if each.pair.attention.startswith("DDR4"))
    assert host.answer.offloaded is not None
    layout = host.answer.offloaded.layout
    assert (layout.compute_devices, layout.attention_devices) == (8, 8)
    assert layout.attention.usd_per_hour == 0
    assert layout.attention.device.kv_bandwidth == pytest.approx(0.8 * 2 * 204.8e9 / 8)
