"""A model small enough to start in seconds, and a terminal to start it from."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.cli.terminal import Terminal


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers with a byte tokenizer and a window of 4096 tokens."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    vocabulary = {token: number for number, token in enumerate(["<eos>", *pre_tokenizers.ByteLevel.alphabet()])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=len(vocabulary),
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def slices(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one test has sliced the next need not slice."""
    return tmp_path_factory.mktemp("slices")


@pytest.fixture
def terminal(slices: Path) -> Iterator[Terminal]:
    """A terminal; pytest's own folders have names too long for sockets."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as folder:
        yield Terminal(Path(folder), slices)
