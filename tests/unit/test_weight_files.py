"""What weights are, by their files' headers."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from pannier.runtime.model_source import EMBEDDED
from pannier.runtime.weight_files import stored_in


def test_the_usual_matrix_is_the_one_with_the_most_numbers_over_all_files(tmp_path: Path) -> None:
    save_file({"a": torch.ones(8, 4), "norm": torch.ones(64, dtype=torch.bfloat16)}, tmp_path / "1.safetensors")
    save_file({"b": torch.ones(8, 4), "c": torch.ones(6, 6)}, tmp_path / "2.safetensors")
    stored = stored_in(tmp_path)
    assert (stored.dtype, stored.usual_matrix) == ("float32", (8, 4))
    assert stored.elements == {"float32": 100, "bfloat16": 64}


def test_the_embedded_model_is_stored_in_bfloat16() -> None:
    stored = stored_in(EMBEDDED)
    assert stored.dtype == "bfloat16"
    assert stored.usual_matrix == (576, 288)


def test_no_weights_are_no_type(tmp_path: Path) -> None:
    assert (stored_in(tmp_path).dtype, stored_in(tmp_path).usual_matrix) == ("", None)
