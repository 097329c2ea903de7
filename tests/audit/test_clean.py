"""A model with nothing to fix."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from pannier.audit import Size, Verdict, Workload, audit
from pannier.audit.static import trace
from pannier.runtime.model_source import EMBEDDED
from tests.audit.conftest import llama

BF16 = torch.bfloat16


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("layers", [2, 6])
def test_a_llama_in_bfloat16_shows_its_small_casts_to_keep_and_nothing_else(layers: int) -> None:
    """4 L + 5 of them: two for each of 2 L + 1 norms, and three for the rotary embedding; the profiler agrees."""
    model = llama(BF16, num_hidden_layers=layers)
    found = audit(model, Workload(steps=2), graph=trace(model.config, BF16))
    assert not found.fixes
    assert {each.judgement.verdict for each in found.findings} == {Verdict.KEEP}
    assert {each.judgement.reason for each in found.findings} == {"precision"}
    assert {each.site.size for each in found.findings} == {Size.ACTIVATION}
    for phase in ("decode", "prefill"):
        assert sum(each.amounts[phase].count for each in found.findings) == 4 * layers + 5
    assert found.checks == (
        f"the profiler saw the same {4 * layers + 5} casts in a decode pass",
        f"the traced model has the same {4 * layers + 5} casts",
    )
    assert not found.fallbacks


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_header_says_what_is_in_use() -> None:
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=BF16)
    found = audit(model, Workload(steps=2), storage="bfloat16")
    types = found.dtypes
    roles = (types.storage, types.parameters, types.compute, types.kv, types.wire, types.logits)
    assert roles == ("bfloat16",) * 6
    assert found.attention == "scaled_dot_product_flash_attention_for_cpu"
    weights = sum(weight.nbytes for weight in model.parameters())
    kept = 2 * 6 * 3 * 32 * 2 * (64 + 1)
    assert weights <= found.budget.streamed <= weights + kept + 2 * 288 + 4 * 16  # a row, and rotary frequencies
    assert found.budget.step_s > found.budget.conversion_s > 0


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_rounded_rotary_frequencies_are_reported() -> None:
    """`model.to(bfloat16)` rounds them, without a word."""
    model = llama(torch.float32)
    torch.nn.Module.to(model, BF16)
    found = audit(model, Workload(steps=1))
    assert any("rotary frequencies are rounded to bfloat16" in each for each in found.fallbacks)
