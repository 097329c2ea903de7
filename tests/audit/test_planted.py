"""Faults that are planted are found first, each with a bound that its removal doesn't exceed."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM

from pannier.audit import Audit, Device, Size, Verdict, Workload, audit
from tests.audit.conftest import llama

BF16, FP32, FP16 = torch.bfloat16, torch.float32, torch.float16
TRIES = 3
MEDIUM: dict[str, Any] = {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4}
MEDIUM |= {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}


class WideCache(DynamicCache):
    """The fault: keys and values are kept in float32, and cast for every step."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        keys, values = super().update(key_states.float(), value_states.float(), *args, **kwargs)
        return keys.to(key_states.dtype), values.to(value_states.dtype)


class AllLogits(LlamaForCausalLM):
    """The fault: float32 logits of every row of a prompt."""

    def forward(self, *args: Any, **others: Any) -> Any:
        """As the class above, and then some."""
        output = super().forward(*args, **others)
        output.logits = output.logits.float()
        return output


NOISE = 0.15
"""By so much of a step's time two runs may differ where other tests run too."""


def _gain(phase: str, before: Callable[[], Audit], after: Callable[[], Audit]) -> tuple[Audit, float]:
    """The audit of a faulty model, and the part of its time that is gained without the fault: of the best of tries."""
    faulty, sound = [], []
    for _ in range(TRIES):
        found = before()
        faulty.append(found.recording.step_s(phase))
        sound.append(after().recording.step_s(phase))
    return found, 1 - min(sound) / min(faulty)


def _assert_first(found: Audit, size: Size, phase: str, gain: float) -> None:
    best, finding = found.fixes[0], found.findings[0]
    assert (finding.judgement.verdict, finding.site.size) == (Verdict.FIX, size)
    assert finding.site in best.sites
    assert gain <= best.amounts[phase].gain + NOISE
    assert best.amounts[phase].share <= best.amounts[phase].gain


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_weights_that_autocast_converts_in_every_step() -> None:
    wide, narrow = llama(FP32, **MEDIUM), llama(BF16, **MEDIUM)
    work = Workload(steps=4)
    careless = Workload(steps=4, autocast=BF16)
    found, gain = _gain("decode", lambda: audit(wide, careless), lambda: audit(narrow, work))
    _assert_first(found, Size.WEIGHT, "decode", gain)
    amount = found.fixes[0].amounts["decode"]
    assert amount.count == 7 * 4 + 1
    matrices = sum(weight.numel() for name, weight in wide.named_parameters() if weight.dim() > 1)
    assert amount.nbytes == (4 + 2) * (matrices - 8192 * 512)  # the embedding is looked up in
    assert amount.share > 0.2


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_cache_in_float32() -> None:
    model, work = llama(BF16, **MEDIUM), Workload(prompt=1500, steps=4)
    found, gain = _gain(
        "decode", lambda: audit(model, work, make_cache=WideCache), lambda: audit(model, work, make_cache=DynamicCache)
    )
    _assert_first(found, Size.CACHE, "decode", gain)
    assert found.dtypes.kv == "float32"
    assert found.fixes[0].amounts["decode"].count == 2 * 4


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_float32_logits_of_every_row() -> None:
    sizes = {**MEDIUM, "hidden_size": 256, "vocab_size": 32768}
    faulty, sound = llama(BF16, AllLogits, **sizes), llama(BF16, **sizes)
    work = Workload(prompt=256, steps=1)
    found, gain = _gain("prefill", lambda: audit(faulty, work), lambda: audit(sound, work))
    _assert_first(found, Size.VOCABULARY, "prefill", gain)
    assert found.dtypes.logits == "float32"


class LastLogits(LlamaForCausalLM):
    """No fault: float32 logits of the row that is sampled from."""

    def forward(self, *args: Any, **others: Any) -> Any:
        """As the class above, of one row."""
        output = super().forward(*args, logits_to_keep=1, **others)
        output.logits = output.logits.float()
        return output


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_float32_logits_of_the_last_row_are_kept() -> None:
    found = audit(llama(BF16, LastLogits), Workload(steps=2, batch=2))
    (logits,) = [each for each in found.findings if each.site.size is Size.VOCABULARY]
    assert (logits.judgement.verdict, logits.amounts["prefill"].count) == (Verdict.KEEP, 1)
    assert not found.fixes


TURING = Device("a T4, simulated", "cuda", ("float32", "float16"), 320e9, "7.5", ("sm_75",))


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_type_that_the_device_emulates() -> None:
    """The whole of the products is the bound, less what reading the weights takes; float16 there removes the fault."""
    found = audit(llama(BF16), device=TURING)
    fix, finding = found.fixes[0], found.findings[0]
    assert str(finding.site) == "(every product): bfloat16 to float32, emulated, weight-sized"
    assert "float16" in fix.remedy
    assert "bfloat16 is emulated: the device multiplies float32, float16" in found.fallbacks
    amount = fix.amounts["decode"]
    assert amount.count == 3 * 7 + 1 + 3  # linear layers, the head, and attention
    assert 0 < amount.bound_s <= amount.seconds
    assert not audit(llama(FP16), device=TURING).fixes


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the switches of torch and oneDNN are for x86")
def test_what_float32_gains_on_a_processor_without_bfloat16_is_within_the_bound() -> None:
    """Really emulated: torch and oneDNN are told to use no instruction newer than AVX2."""
    older = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[2]
    run = [sys.executable, "-m", "tests.audit.emulated"]
    stdout = subprocess.run(run, env=os.environ | older, cwd=root, capture_output=True, text=True, check=True).stdout
    found = json.loads(stdout.splitlines()[-1])
    assert found["how"] == "emulated"
    assert found["fallbacks"][0] == "bfloat16 is emulated: the device multiplies float32"
    assert 0.1 < found["gain"] <= found["bound"]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_conversions_that_come_to_nothing_are_no_faults() -> None:
    """A router's small weights in float32, say: sized like weights, and not worth a verdict."""

    class Routed(LlamaForCausalLM):
        def forward(self, *args: Any, **others: Any) -> Any:
            """With one small product in float32 behind it."""
            output = super().forward(*args, **others)
            rows = output.logits[..., :8].float() @ self.model.norm.weight[:64].view(8, 8).float()
            output.logits = output.logits + rows.sum().to(output.logits.dtype) * 0
            return output

    found = audit(llama(BF16, Routed, **MEDIUM), Workload(steps=2))
    (weights,) = [each for each in found.findings if each.site.size is Size.WEIGHT]
    assert weights.judgement.verdict is Verdict.KEEP
    assert not found.fixes
