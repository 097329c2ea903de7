"""Models of many kinds, whole and sliced, agree: windows, sinks, soft-caps, experts, and rotary kinds that vary."""

from pathlib import Path
from typing import Any

import pytest
import torch

from pannier.slicer import SlicedModel, load, slice_model

from .small import assert_close, sliced_logits, small_model, some_ids, whole_logits

LENGTH = 24
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": 16,
}
LONG: dict[str, Any] = {
    "max_position_embeddings": LENGTH,
    "original_max_position_embeddings": 16,
    "rope_parameters": LONG_ROPE,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("gpt2", {}),
        ("gemma2", {"head_dim": 16, "sliding_window": 7, "attn_logit_softcapping": 5.0}),
        ("gemma3_text", {"head_dim": 16, "sliding_window": 7, "num_hidden_layers": 6}),
        ("gpt_oss", {"head_dim": 16, "sliding_window": 7, "num_local_experts": 4, "num_experts_per_tok": 2}),
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9}),
        ("qwen3_moe", EXPERTS | {"head_dim": 12, "num_experts": 4}),
        ("phi3", LONG),
        ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": 10}),
        ("deepseek_v3", EXPERTS | {
            "num_key_value_heads": 6, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
            "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10,
        }),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_sliced_and_whole_agree(model_type: str, settings: dict[str, Any], cache_dir: Path) -> None:
    model, ids = small_model(model_type, **settings), some_ids(LENGTH)
    want = whole_logits(model, ids)
    sliced = slice_model(model, max_model_len=LENGTH, cache_dir=cache_dir)
    assert_close(sliced_logits(sliced, ids), want)
    assert_calls_match(sliced, settings)


def assert_calls_match(sliced: SlicedModel, settings: dict[str, Any]) -> None:
    windows = {call.window for call in sliced.calls}
    assert windows <= {0, settings.get("sliding_window") or 0}
    assert ("sliding_window" in settings) == (max(windows) > 0)
    assert {call.softcap for call in sliced.calls} == {settings.get("attn_logit_softcapping", 0.0)}
    if "v_head_dim" in settings:
        assert {(call.k_size, call.v_size) for call in sliced.calls} == {(20, 10)}
    for call in sliced.calls:
        sinks = sliced.sinks(call)
        assert sinks is None or sinks.shape == (call.q_heads,)


def test_frozen_rotary_embeddings_do_not_depend_on_neighbours(cache_dir: Path) -> None:
    """Short sequences use the frequencies of the longest one allowed, so that keys never go stale."""
    model, ids = small_model("phi3", **LONG), some_ids(LENGTH)
    want = whole_logits(model, ids)
    sliced = slice_model(model, max_model_len=LENGTH, cache_dir=cache_dir)
    assert_close(sliced_logits(sliced, ids[:5]), want[:5])


def test_a_saved_model_loads(tmp_path: Path, cache_dir: Path) -> None:
    model, ids, told = small_model("llama", tie_word_embeddings=True), some_ids(LENGTH), list[str]()
    model.save_pretrained(tmp_path)
    sliced = load(tmp_path, dtype=torch.float32, device="cpu", cache_dir=cache_dir, progress=told.append)
    assert_close(sliced_logits(sliced, ids), whole_logits(model, ids))
    assert (sliced.max_model_len, sliced.vocab_size, sliced.dtype) == (256, 160, torch.float32)
    assert [message.split()[0] for message in told] == ["proving", "loading", "slicing"]


def test_bfloat16_stays_bfloat16(cache_dir: Path) -> None:
    model, ids = small_model("llama", dtype=torch.bfloat16), some_ids(LENGTH)
    want = whole_logits(model, ids)
    sliced = slice_model(model, cache_dir=cache_dir)
    asked = next(sliced.run(ids, torch.arange(LENGTH), torch.arange(LENGTH)))
    assert {asked.q.dtype, asked.k.dtype, asked.v.dtype} == {torch.bfloat16}
    got = sliced_logits(sliced, ids)
    assert got.dtype == torch.bfloat16
    assert_close(got.float(), want.float(), 0.1)
