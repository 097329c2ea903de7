"""Traced models, without weights, and devices that aren't here."""

import pytest
import torch
from transformers import AutoConfig, BloomConfig, LlamaConfig

from pannier.audit import Verdict, Workload
from pannier.audit.calls import streamed_bytes
from pannier.audit.predict import audit_elsewhere
from pannier.audit.rules import How, conversions_of
from pannier.audit.static import Graph, trace
from pannier.planner.catalogue import load_catalogue
from pannier.runtime.model_source import EMBEDDED
from tests.audit.conftest import SIZES

BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def graph() -> Graph:
    return trace(AutoConfig.from_pretrained(EMBEDDED), BF16)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_traced_llama_has_its_casts_and_reads_its_weights(graph: Graph) -> None:
    calls = graph.calls(1)
    casts = [each for call in calls for each in conversions_of(call) if each.how is How.EXPLICIT]
    assert len(casts) == 4 * 6 + 5
    assert {each.call.path for each in casts} == {
        "model.rotary_emb", "model.norm", "model.layers.*.input_layernorm", "model.layers.*.post_attention_layernorm",
    }  # fmt: skip
    weights = 2 * 5_201_568  # its head is its embedding, which is read whole
    assert weights <= streamed_bytes(calls, graph.stored) <= weights + 2 * 288 + 4 * 16
    rows = graph.calls(7)
    assert sum(each.source.elements for call in rows for each in conversions_of(call)) == 7 * sum(
        each.source.elements for each in casts if "norm." not in each.call.path and each.call.path != "model.norm"
    ) + 7 * sum(each.source.elements for each in casts if each.call.path == "model.norm")


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_what_cannot_be_sliced_is_traced_as_it_is() -> None:
    """Bloom has attention of its own."""
    config = BloomConfig(vocab_size=128, hidden_size=32, n_layer=2, n_head=4)
    calls = trace(config, BF16).calls(1)
    assert any(call.op in ("baddbmm", "bmm") for call in calls)
    assert any(conversions_of(call) for call in calls)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_turing_emulates_what_an_ampere_multiplies() -> None:
    """G5g is a T4G, G5 an A10G: the name says neither, the catalogue both. The bound is what widening moves at most."""
    catalogue, config = load_catalogue(), LlamaConfig(**SIZES)
    found = {
        name: audit_elsewhere(config, BF16, catalogue.accelerator(catalogue.instance(name).accelerator), instance=name)
        for name in ("g5g.xlarge", "g5.xlarge")
    }
    assert all("predicted" in each.device.name for each in found.values())
    assert not found["g5.xlarge"].fixes
    assert not found["g5.xlarge"].fallbacks
    emulated = found["g5g.xlarge"]
    assert emulated.findings[0].site.how is How.EMULATED
    assert emulated.findings[0].judgement.verdict is Verdict.FIX
    assert "T4G" in emulated.device.name
    amount = emulated.fixes[0].amounts["decode"]
    # Two bytes read, four written and four read again, where two are enough.
    assert amount.gain == pytest.approx(1 - 2 / 10, abs=0.03)
    halves = audit_elsewhere(config, torch.float16, catalogue.accelerator("T4G"), Workload())
    assert not halves.fixes
