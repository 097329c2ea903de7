"""Small random models, and a caller of sliced ones that shares no code with the proof."""

from collections.abc import Generator
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from pannier.slicer import Attend, SlicedModel

SIZES = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 160,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def small_config(model_type: str, **settings: Any) -> PretrainedConfig:
    """A small configuration of a type; `settings` override the sizes."""
    return CONFIG_MAPPING[model_type](**(SIZES | settings))


def small_model(model_type: str, dtype: torch.dtype = torch.float32, **settings: Any) -> PreTrainedModel:
    """A small random model of a type, under the library's plainest attention."""
    torch.manual_seed(7)
    config = small_config(model_type, **settings)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=dtype)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.15)
    model.train(False)
    return model


def some_ids(count: int) -> torch.Tensor:
    return torch.randint(3, SIZES["vocab_size"], (count,), generator=torch.Generator().manual_seed(3))


def whole_logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """What the uncut model says: [T, V]."""
    with torch.no_grad():
        logits: torch.Tensor = model(ids[None], use_cache=False).logits[0]
    return logits


def sliced_logits(model: SlicedModel, ids: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
    """What the sliced model says about one whole sequence: [R, V], of all rows if none are named."""
    positions = torch.arange(len(ids))
    logits = drive(model, model.run(ids, positions, positions if rows is None else rows), (len(ids),))
    assert logits is not None
    return logits


def drive(
    model: SlicedModel, running: Generator[Attend, torch.Tensor, torch.Tensor | None], sizes: tuple[int, ...]
) -> torch.Tensor | None:
    """Answers a running step over whole sequences of these sizes: what it returns."""
    asked = next(running)
    while True:
        parts = zip(*(x.split(sizes) for x in (asked.q, asked.k, asked.v)), strict=True)
        sinks = model.sinks(asked.call)
        answer = torch.cat([attend_alone(Attend(asked.call, *part), sinks) for part in parts])
        try:
            asked = running.send(answer)
        except StopIteration as finished:
            logits: torch.Tensor | None = finished.value
            return logits


def attend_alone(asked: Attend, sinks: torch.Tensor | None) -> torch.Tensor:
    """Attention among the rows of one sequence that has no past, head by head: [T, H, Dv]."""
    call, rows = asked.call, torch.arange(asked.q.shape[0])
    distance = rows[:, None] - rows[None]
    hidden = (distance < 0) | ((distance >= call.window) if call.window else torch.tensor(False))
    heads = []
    for head in range(call.q_heads):
        kv_head = head * call.kv_heads // call.q_heads
        scores = asked.q[:, head] @ asked.k[:, kv_head].T * call.scale
        if call.softcap:
            scores = call.softcap * torch.tanh(scores / call.softcap)
        weights = scores.masked_fill(hidden, float("-inf")).exp()
        total = weights.sum(-1, keepdim=True) + (0 if sinks is None else sinks[head].exp())
        heads.append(weights / total @ asked.v[:, kv_head])
    return torch.stack(heads, 1)


def assert_close(got: torch.Tensor, want: torch.Tensor, tolerance: float = 1e-5) -> None:
    difference = float((got - want).abs().max() / want.abs().max())
    assert difference <= tolerance, f"differ by {difference:.1e} of the largest"
