"""What can't be served is refused in one sentence that names it and says why."""

import json
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING, LlamaConfig, LlamaForCausalLM, masking_utils

from pannier.slicer import CannotLoad, CannotSlice, load, slice_model
from pannier.slicer.attend import attention, window_of
from pannier.slicer.export import export
from pannier.slicer.load import longest
from pannier.slicer.prove import prove
from pannier.slicer.refusal import Unsupported

from .small import small_config, small_model


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        pytest.param("mamba", "state of their own", marks=pytest.mark.slow),
        pytest.param("falcon_h1", "state of their own", marks=pytest.mark.slow),
        ("bloom", "attention of its own"),
        ("bert", "is not a causal decoder"),
        ("bart", "is not a causal decoder"),
        pytest.param("llama4_text", "chunked_overlay", marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(240)
def test_a_type_that_cannot_be_sliced_says_why(model_type: str, reason: str, cache_dir: Path) -> None:
    with pytest.raises(CannotSlice, match=reason) as refusal:
        prove(CONFIG_MAPPING[model_type](), 2048, cache_dir)
    assert refusal.value.model_type == model_type
    assert str(refusal.value).startswith(f"{model_type}: ")
    assert "\n" not in str(refusal.value)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(CannotLoad, match=f"{tmp_path}/absent: there is no such folder"):
        load(tmp_path / "absent", dtype=torch.float32, device="cpu")


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(CannotLoad, match=f"{tmp_path}: no model can be loaded"):
        load(tmp_path, dtype=torch.float32, device="cpu")


def test_a_gguf_file_is_refused() -> None:
    with pytest.raises(CannotLoad, match="is a GGUF file"):
        load("model.gguf", dtype=torch.float32, device="cpu")


@pytest.mark.parametrize("method", ["gptq", "awq", "fp8"])
def test_quantised_weights_are_refused(method: str, tmp_path: Path) -> None:
    settings = small_config("llama").to_dict() | {"quantization_config": {"quant_method": method, "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(CannotLoad, match=rf"quantised \({method}\)"):
        load(tmp_path, dtype=torch.float32, device="cpu")


def test_a_model_that_lacks_weights_is_refused(tmp_path: Path, cache_dir: Path) -> None:
    """The library would draw random ones, with a mere warning."""
    model = small_model("llama")
    model.save_pretrained(tmp_path, state_dict={k: v for k, v in model.state_dict().items() if "layers.1.mlp" not in k})
    with pytest.raises(CannotLoad, match=r"3 of its weights are missing, such as model.layers.1.mlp.down_proj.weight"):
        load(tmp_path, dtype=torch.float32, device="cpu", cache_dir=cache_dir)


def test_pickled_weights_are_refused(tmp_path: Path, cache_dir: Path) -> None:
    small_config("llama").save_pretrained(tmp_path)
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CannotLoad, match="its weights can't be loaded"):
        load(tmp_path, dtype=torch.float32, device="cpu", cache_dir=cache_dir)


def test_a_class_of_ones_own_is_refused(cache_dir: Path) -> None:
    class Own(LlamaForCausalLM):
        pass

    with pytest.raises(CannotSlice, match="is no class of the library"):
        slice_model(Own(LlamaConfig(num_hidden_layers=1, hidden_size=64)), cache_dir=cache_dir)


def test_a_model_that_keeps_something_is_refused() -> None:
    model = small_model("llama", num_hidden_layers=1)
    model.register_buffer("steps", torch.zeros(1))

    def count(module: torch.nn.Module, *_: object) -> None:
        module.get_buffer("steps").add_(1)

    model.register_forward_hook(count)
    with pytest.raises(Unsupported, match="changes its own buffers"):
        export(model)


def test_more_positions_than_the_model_has_are_refused() -> None:
    config = small_config("gpt2", max_position_embeddings=64)
    assert longest(config, None) == 64
    with pytest.raises(ValueError, match="65 is more than the model's 64"):
        longest(config, 65)


def test_a_model_that_sees_the_future_is_refused(cache_dir: Path) -> None:
    """Settings belong to the proof: a type that may be sliced isn't sliced with a mask that attention can't do."""
    model = small_model("gemma3_text", use_bidirectional_attention=True, num_hidden_layers=2)
    with pytest.raises(CannotSlice, match="or_masks"):
        slice_model(model, cache_dir=cache_dir)


def test_rotary_embeddings_that_adapt_do_more_positions() -> None:
    rotary = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    config = small_config("llama", rope_parameters=rotary, max_position_embeddings=64)
    assert (longest(config, None), longest(config, 256)) == (64, 256)
    with pytest.raises(ValueError, match="257 is more"):
        longest(config, 257)


# Masks.


def test_causal_masks_have_a_window() -> None:
    assert window_of(masking_utils.causal_mask_function) == 0
    assert window_of(masking_utils.sliding_window_causal_mask_function(7)) == 7


def test_packed_rows_are_causal_all_the_same() -> None:
    positions = torch.arange(4)[None]
    packed = masking_utils.packed_sequence_mask_function(positions)
    for window, mask in (
        (0, masking_utils.causal_mask_function),
        (7, masking_utils.sliding_window_causal_mask_function(7)),
    ):
        remapped = masking_utils.remap_positions_for_packed_sequence(mask, positions)
        assert window_of(masking_utils.and_masks(remapped, packed)) == window


@pytest.mark.parametrize(
    "mask",
    [
        masking_utils.bidirectional_mask_function,
        masking_utils.sliding_window_bidirectional_mask_function(7),
        masking_utils.chunked_causal_mask_function(7, torch.zeros(1, dtype=torch.int64)),
        masking_utils.or_masks(masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function),
        masking_utils.and_masks(masking_utils.causal_mask_function, lambda *_: True),
        masking_utils.and_masks(masking_utils.sliding_window_overlay(7)),
        masking_utils.and_masks(
            masking_utils.sliding_window_overlay(7), masking_utils.sliding_window_causal_mask_function(5)
        ),
        lambda *_: True,
    ],
    ids=["bidirectional", "both-ways-window", "chunked", "or", "and-more", "window-alone", "two-windows", "unknown"],
)
def test_other_masks_are_refused(mask: object) -> None:
    with pytest.raises(Unsupported):
        window_of(mask)  # type: ignore[arg-type]


# Attention calls.


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"is_causal": False}, "isn't causal"),
        ({"attention_mask": None}, "without a mask"),
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"head_mask": torch.zeros(1)}, "head_mask"),
        ({"alibi": torch.zeros(1)}, "alibi"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_attention_refuses_what_it_does_not_know(settings: dict[str, object], reason: str) -> None:
    q = torch.zeros(1, 2, 3, 4)
    given = {"attention_mask": torch.zeros(1, 1, 3, 3)} | settings
    with pytest.raises(Unsupported, match=reason):
        attention(torch.nn.Identity(), q, q, q, **given)  # type: ignore[arg-type]
