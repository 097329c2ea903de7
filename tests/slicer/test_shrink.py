"""A small configuration keeps every kind of layer, and nothing in it is longer than the proof's sequences."""

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from pannier.slicer.rotary import freeze_rotary
from pannier.slicer.shrink import FEW_LAYERS, LENGTH, RECIPES, SHORT, Kind, kind_of, shrink

from .small import small_model


def shrunk(model_type: str, max_model_len: int = 2048, **settings: Any) -> dict[str, Any]:
    return shrink(CONFIG_MAPPING[model_type](**settings), max_model_len, RECIPES[0]).to_dict()


def test_two_sizes_of_a_type_shrink_to_the_same() -> None:
    large = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_hidden_layers": 80}
    assert shrunk("llama", num_key_value_heads=8, **large) == shrunk("llama", num_key_value_heads=4)


@pytest.mark.parametrize(("heads", "kv_heads", "want"), [(32, 32, (4, 4)), (32, 8, (4, 2)), (32, 1, (4, 1))])
def test_how_heads_are_shared_stays(heads: int, kv_heads: int, want: tuple[int, int]) -> None:
    small = shrunk("llama", num_attention_heads=heads, num_key_value_heads=kv_heads)
    assert (small["num_attention_heads"], small["num_key_value_heads"]) == want


def test_every_kind_of_layer_stays() -> None:
    small = shrunk("gemma3_text")
    assert set(small["layer_types"]) == {"sliding_attention", "full_attention"}
    assert len(small["layer_types"]) == small["num_hidden_layers"] < 26
    experts = shrunk("deepseek_v3")
    assert 0 < experts["first_k_dense_replace"] < experts["num_hidden_layers"]
    assert shrunk("llama")["num_hidden_layers"] == FEW_LAYERS


def test_lengths_are_shorter_than_sequences() -> None:
    assert shrunk("mistral")["sliding_window"] == SHORT < LENGTH
    assert LENGTH <= shrunk("mistral")["max_position_embeddings"] < 2 * LENGTH
    assert shrunk("llama4_text")["attention_chunk_size"] == SHORT
    assert shrunk("deepseek_v32")["index_topk"] == SHORT


def test_a_number_of_unknown_meaning_becomes_small() -> None:
    assert kind_of("frobnication") is Kind.UNKNOWN
    small = shrunk("llama", frobnication=4096, rope_interval=4096)
    assert max(small["frobnication"], small["rope_interval"]) < LENGTH


@pytest.mark.parametrize(("max_model_len", "longer"), [(4096, False), (4097, True)])
def test_long_rope_stays_on_its_side(max_model_len: int, longer: bool) -> None:
    rotary = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 4096}
    rotary |= {"short_factor": [1.0] * 48, "long_factor": [1.0 * i for i in range(1, 49)]}
    small = shrunk("phi3", max_model_len, rope_parameters=rotary, max_position_embeddings=131072)
    assert (small["rope_parameters"]["original_max_position_embeddings"] < LENGTH) == longer
    assert small["rope_parameters"]["long_factor"][0] == 1.0
    assert small["rope_parameters"]["long_factor"][-1] == 48.0
    assert len(small["rope_parameters"]["long_factor"]) == 64 // 4 // 2


@pytest.mark.parametrize(("max_model_len", "factor"), [(16, 1.0), (17, 2.0)])
def test_frozen_frequencies_are_those_of_the_longest_length(max_model_len: int, factor: float) -> None:
    rotary = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16}
    rotary |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    model = small_model("phi3", rope_parameters=rotary, original_max_position_embeddings=16)
    embedding: Any = model.get_submodule("model.rotary_emb")
    unscaled = embedding.original_inv_freq.clone()
    freeze_rotary(model, max_model_len)
    embedding(torch.zeros(1), torch.tensor([[3]]))
    torch.testing.assert_close(embedding.inv_freq, unscaled / factor)
    embedding(torch.zeros(1), torch.tensor([[200]]))
    torch.testing.assert_close(embedding.inv_freq, unscaled / factor)
