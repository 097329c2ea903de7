"""Small random models of many types, saved as folders, and what the uncut model says of them."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

VOCAB = 256
WINDOW = 12
"""Shorter than the prompts, for types that have a sliding window."""

_GROUPED = {
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
_WINDOWED = {**_GROUPED, "sliding_window": WINDOW}
_EXPERTS = {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}

SHAPES: dict[str, dict[str, Any]] = {
    "llama": _GROUPED,
    "mistral": _WINDOWED,
    "qwen2": {k: v for k, v in _WINDOWED.items() if k != "head_dim"}
    | {"use_sliding_window": True, "max_window_layers": 1},
    "qwen3": _GROUPED,
    "gemma2": {**_WINDOWED, "query_pre_attn_scalar": 16},
    "gemma3_text": {
        **_WINDOWED,
        "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "phi3": {k: v for k, v in _WINDOWED.items() if k != "head_dim"} | {"original_max_position_embeddings": 256},
    "gpt2": {"n_embd": 96, "n_layer": 3, "n_head": 3, "n_positions": 256},
    "opt": {
        "hidden_size": 96,
        "ffn_dim": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "max_position_embeddings": 256,
        "word_embed_proj_dim": 96,
    },
    "gpt_neox": {k: v for k, v in _GROUPED.items() if k not in ("num_key_value_heads", "head_dim")}
    | {"num_attention_heads": 3},
    "olmo2": {k: v for k, v in _GROUPED.items() if k != "head_dim"},
    "cohere": {k: v for k, v in _GROUPED.items() if k != "head_dim"},
    "starcoder2": {k: v for k, v in _WINDOWED.items() if k != "head_dim"},
    "mixtral": {**_EXPERTS, "sliding_window": WINDOW},
    "qwen3_moe": {**_GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "gpt_oss": {
        **_EXPERTS,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}
"""16 types with what makes them small: three KV heads, so that two workers get uneven shards."""


def save_random_model(model_type: str, folder: Path, seed: int = 0) -> PreTrainedModel:
    """Write a model with a tokenizer into `folder`; returned is the same model, uncut, with eager attention."""
    config = AutoConfig.for_model(
        model_type, vocab_size=VOCAB, pad_token_id=0, bos_token_id=1, eos_token_id=2, **SHAPES[model_type]
    )
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # Large enough that attention decides what comes next; the library's own start would repeat one token.
            if weight.dim() >= 2 or "sink" in name:
                weight.normal_(0, 0.2 if "embed" not in name else 1.0)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return model


def save_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer of exactly `VOCAB` tokens without merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[: VOCAB - 3]
    vocabulary = {token: number for number, token in enumerate(["<pad>", "<bos>", "<eos>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")
    fast.save_pretrained(folder)


def logprobs_after(model: PreTrainedModel, prompt: list[int], output: list[int]) -> torch.Tensor:
    """[len(output), V]: what the uncut model says before each token of the output."""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([prompt + output]), use_cache=False).logits[0]
    return logits[len(prompt) - 1 : -1].float().log_softmax(-1)


def logprobs_without_past(model: PreTrainedModel, prompt: list[int], output: list[int]) -> torch.Tensor:
    """The same, but every token sees only itself: what a check must tell apart from the truth."""
    tokens = torch.tensor(prompt + output)
    positions = torch.arange(len(tokens))
    with torch.inference_mode():
        logits: torch.Tensor = model(tokens[:, None], position_ids=positions[:, None], use_cache=False).logits[:, 0]
    return logits[len(prompt) - 1 : -1].float().log_softmax(-1)
