"""Small models of transformers, and a clock that other processes don't disturb."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pannier.audit.clock import Clock

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
}


def llama(dtype: torch.dtype, kind: type[LlamaForCausalLM] = LlamaForCausalLM, **sizes: Any) -> LlamaForCausalLM:
    """A random Llama as a server has it: nothing is trained, and rotary frequencies are float32."""
    torch.manual_seed(0)
    config = LlamaConfig(**{**SIZES, **sizes})
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model = kind(config)
    finally:
        torch.set_default_dtype(before)
    model.requires_grad_(False)
    model.train(False)
    return model


@pytest.fixture(scope="package", autouse=True)
def _one_thread() -> Iterator[None]:
    """So that a thread's own time is all that is taken."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Clock, "now", staticmethod(time.thread_time))
