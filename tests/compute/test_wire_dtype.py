"""Links may carry another type than the model computes in: converted once each way, counted, and never infinite."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pannier.compute.wire_dtype import LARGEST_HALF, WireDtype
from pannier.slicer import SlicedModel, slice_model
from pannier.wire import Dtype

from .conftest import CONFIG
from .rig import Stack, accept, texts

pytestmark = pytest.mark.timeout(60)
CONVERSIONS = ("converted_to_wire", "converted_from_wire")


def conversions(stack: Stack) -> tuple[int, ...]:
    return tuple(stack.core.counters[name] for name in CONVERSIONS)


@pytest.mark.parametrize("dtype", [Dtype.FLOAT16, Dtype.FLOAT32])
def test_each_call_converts_once_each_way(dtype: Dtype, sliced: SlicedModel) -> None:
    """However many shards there are. A fresh prompt has no answer; attention workers convert nothing."""
    stack = Stack(sliced, shards=(2,), dtype=dtype)
    (text,) = texts([5])
    calls = len(sliced.calls) * (dtype is Dtype.FLOAT16)
    (done,) = stack.run(stack.step().last_chunk(text).made())
    accept(text, done.drawn[0])
    assert conversions(stack) == (calls, 0)
    for number in range(1, 4):
        (done,) = stack.run(stack.step().decode(text).made())
        accept(text, done.drawn[0])
        assert conversions(stack) == ((1 + number) * calls, number * calls)
    assert all(core.counters["converted_pieces"] == 0 for core in stack.attention.values())


def test_answers_that_are_merged_are_converted_once_too(sliced: SlicedModel) -> None:
    """Those of chunks with a past."""
    stack = Stack(sliced, dtype=Dtype.FLOAT16)
    (text,) = texts([9])
    stack.run(stack.step().chunk(text, 4).made())
    stack.run(stack.step().last_chunk(text).made())
    assert conversions(stack) == (2 * len(sliced.calls), len(sliced.calls))


def test_what_is_too_large_becomes_the_largest_number_and_is_counted() -> None:
    """Not infinity. What is no number stays none."""
    counters: Counter[str] = Counter()
    wire = WireDtype(torch.bfloat16, torch.float16, counters)
    q = torch.tensor([1e5, -7e4, 6e4, float("nan")]).bfloat16()
    k, v = torch.ones(2, 3).bfloat16(), torch.full((3,), 1e30).bfloat16()
    sent_q, sent_k, sent_v = wire.sent(q, k, v)
    assert sent_q[:3].tolist() == [LARGEST_HALF, -LARGEST_HALF, float(q[2])]
    assert sent_q[3].isnan()
    assert sent_k.equal(k.half())
    assert sent_v.tolist() == [LARGEST_HALF] * 3
    assert "saturated_values" not in counters, "not looked at while the device works"
    wire.settle()
    assert counters["saturated_values"] == 5
    wire.sent(k, k, k)
    wire.settle()
    assert counters["saturated_values"] == 5


def test_a_model_whose_values_are_too_large_still_answers(tmp_path: Path) -> None:
    """With log-probabilities that are numbers, and a counter that says how far to trust them."""
    torch.manual_seed(3)
    with torch.inference_mode(mode=False):
        model = LlamaForCausalLM(LlamaConfig(**CONFIG)).eval()
        for layer in model.model.layers:
            layer.self_attn.v_proj.weight.detach().mul_(1e6)
        sliced = slice_model(model, cache_dir=tmp_path)
    stack = Stack(sliced, dtype=Dtype.FLOAT16)
    (text,) = texts([5])
    for _ in range(2):
        plan = stack.step()
        (done,) = stack.run((plan.decode(text) if text.stored else plan.last_chunk(text)).made())
        accept(text, done.drawn[0])
        assert all(torch.tensor(top.logprob).isfinite() for top in done.drawn[0].top)
    assert stack.core.counters["saturated_values"] > 0
