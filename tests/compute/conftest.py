"""A small random Llama, whole and in slices."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pannier.slicer import SlicedModel, slice_model

CONFIG: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # so that the past matters
}


def _build() -> LlamaForCausalLM:
    torch.manual_seed(11)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG))  # its own: slicing changes it
    model.set_attn_implementation("eager")
    model.eval()
    return model


@pytest.fixture(scope="package", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tensors are tiny here: threads of torch would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    """As in the step thread."""
    with torch.inference_mode():
        yield


@pytest.fixture(scope="session")
def whole() -> LlamaForCausalLM:
    """The model as transformers runs it."""
    return _build()


@pytest.fixture(scope="session")
def sliced(tmp_path_factory: pytest.TempPathFactory) -> SlicedModel:
    """The same model in slices."""
    with torch.inference_mode(mode=False):
        return slice_model(_build(), cache_dir=tmp_path_factory.mktemp("slices"))
