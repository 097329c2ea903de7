"""Models are loaded in a type that the device computes, and that holds their numbers."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pannier.compute.load import Loaded, load_model, products_s
from pannier.runtime.config import ComputeConfig
from pannier.runtime.errors import ModelError
from pannier.runtime.model_source import resolve
from pannier.wire import Dtype
from tests.compute.conftest import CONFIG

HALVES_ONLY = ("float16",)
"""A device without bfloat16, as Turing GPUs are."""


def _saved(folder: Path, **factors: float) -> Path:
    """A model in bfloat16, some of its weights larger by a factor."""
    with torch.inference_mode(mode=False):
        torch.manual_seed(3)
        model = LlamaForCausalLM(LlamaConfig(**CONFIG)).to(torch.bfloat16)  # type: ignore[arg-type]  # of the library
        for name, weight in model.named_parameters():
            if (factor := factors.get(name.rsplit(".", 2)[-2])) is not None:
                weight.data.mul_(factor)
        model.save_pretrained(folder)
    return folder


def _load(folder: Path, **settings: object) -> Loaded:
    with torch.inference_mode(mode=False):
        config = ComputeConfig.model_validate({"model": str(folder), "cache_dir": folder / "cache", **settings})
        return load_model(config, resolve(str(folder)))


def test_float16_is_taken_where_bfloat16_is_emulated_and_its_range_is_enough(tmp_path: Path) -> None:
    loaded = _load(_saved(tmp_path), emulate_dtypes=HALVES_ONLY)
    assert loaded.model.dtype == torch.float16
    reason = loaded.dtypes["compute"].reason
    assert "would have to convert bfloat16" in reason
    assert "largest weight" in reason
    assert "largest activation on a sample" in reason
    assert loaded.dtypes["storage"].reason == "as it is computed; files hold bfloat16, converted once"


@pytest.mark.slow
@pytest.mark.parametrize(("which", "factor", "what"), [("gate_proj", 1e6, "weight"), ("up_proj", 3e4, "activation")])
def test_a_model_that_overflows_halves_is_computed_in_float32(
    tmp_path: Path, which: str, factor: float, what: str
) -> None:
    """Weights that have no such number, and activations that reach none, where weights still do."""
    loaded = _load(_saved(tmp_path, **{which: factor}), emulate_dtypes=HALVES_ONLY)
    assert loaded.model.dtype == torch.float32
    reason = loaded.dtypes["compute"].reason
    assert what in reason
    assert "too large for float16, which ends at 65504" in reason


def test_a_model_that_overflows_halves_is_refused_if_they_were_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"can't be computed in float16: .* too large .* set dtype to float32 or auto"):
        _load(_saved(tmp_path, gate_proj=1e6), dtype="float16")


def test_on_a_cpu_products_of_the_models_shape_are_timed() -> None:
    found = products_s((64, 48), [Dtype.FLOAT32, Dtype.BFLOAT16])
    assert set(found) == {Dtype.FLOAT32, Dtype.BFLOAT16}
    assert all(0 < seconds < 1 for seconds in found.values())


def test_auto_says_why(tmp_path: Path) -> None:
    loaded = _load(_saved(tmp_path))
    assert set(loaded.dtypes) == {"compute", "storage", "logits"}
    assert loaded.dtypes["compute"].dtype is loaded.dtypes["storage"].dtype
    assert loaded.model.dtype in (torch.bfloat16, torch.float32)
    assert loaded.dtypes["compute"].reason
