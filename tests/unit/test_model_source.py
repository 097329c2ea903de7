"""Where models come from: what is found, what is refused, and when two are the same."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pannier.runtime.errors import ModelError
from pannier.runtime.model_source import resolve
from pannier.runtime.random_models import SHAPES, RandomShape, build


def model_folder(folder: Path, *, hidden: int = 4, value: float = 0.0) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"hidden_size": 4}))
    save_file({"weight": torch.full((2, hidden), value)}, folder / "model.safetensors")
    return folder


def test_a_folder_is_found_under_its_own_name(tmp_path: Path) -> None:
    """The name is the folder's, the path is absolute."""
    source = resolve(str(model_folder(tmp_path / "tiny")))
    assert (source.name, source.path, source.shape) == ("tiny", (tmp_path / "tiny").resolve(), None)


def test_the_digest_tells_models_apart_that_differ_in_shape(tmp_path: Path) -> None:
    """Copies are equal wherever they lie; other shapes and other configurations are not."""
    first = resolve(str(model_folder(tmp_path / "a"))).digest
    assert resolve(str(model_folder(tmp_path / "b"))).digest == first
    assert resolve(str(model_folder(tmp_path / "c", hidden=8))).digest != first
    other = model_folder(tmp_path / "d")
    (other / "config.json").write_text("{}")
    assert resolve(str(other)).digest != first


def test_random_models_are_named_by_shape_and_seed() -> None:
    """The seed is 0 unless given, and part of the digest."""
    assert resolve("random:llama-1b") == resolve("random:llama-1b:0")
    assert resolve("random:llama-1b:1").seed == 1
    assert len({resolve(spec).digest for spec in ("random:llama-1b", "random:llama-1b:1", "random:llama-8b")}) == 3


@pytest.mark.parametrize(
    ("specification", "sentence"),
    [
        ("/no/such/folder", "'/no/such/folder' does not exist"),
        ("random:gpt-5", "names no random model; the shapes are llama-135m"),
        ("random:llama-1b:x", "write random:llama-1b or random:llama-1b:SEED"),
        ("random:llama-1b:1:2", "write random:llama-1b or random:llama-1b:SEED"),
    ],
)
def test_what_is_not_there_is_refused_in_one_sentence(specification: str, sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        resolve(specification)


@pytest.mark.parametrize(
    ("missing", "sentence"), [("config.json", "no config.json"), ("model.safetensors", "no weights")]
)
def test_an_incomplete_folder_is_refused(tmp_path: Path, missing: str, sentence: str) -> None:
    folder = model_folder(tmp_path / "m")
    (folder / missing).unlink()
    with pytest.raises(ModelError, match=sentence):
        resolve(str(folder))


@pytest.mark.parametrize("content", [b"", b"12345678", b"\x10" + b"\0" * 7 + b"{}"])
def test_a_file_that_is_cut_short_is_refused(tmp_path: Path, content: bytes) -> None:
    folder = model_folder(tmp_path / "m")
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match="not a safetensors file"):
        resolve(str(folder))


SMALL = RandomShape(2, 64, 4, 2, 16, 128, 512, tie_word_embeddings=True)


def test_random_weights_depend_on_shape_and_seed_only() -> None:
    """Two processes build the same model."""
    first, again, other = (build(SMALL, seed, torch.float32).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_another_dtype_rounds_the_same_weights() -> None:
    wide, narrow = (build(SMALL, 0, dtype).lm_head.weight for dtype in (torch.float32, torch.bfloat16))
    assert narrow.dtype is torch.bfloat16
    assert torch.allclose(wide, narrow.float(), rtol=2**-7)


def test_random_weights_are_as_wide_as_a_fresh_llamas() -> None:
    """Standard deviation 0.02, mean 0, norms 1; embeddings are tied where the shape says so."""
    model = build(SMALL, 0, torch.float32)
    weight = model.lm_head.weight
    assert weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert weight.mean().item() == pytest.approx(0, abs=0.001)
    assert weight is model.model.embed_tokens.weight
    assert bool((model.model.norm.weight == 1).all())
    assert all(bool(torch.isfinite(w).all()) for w in model.parameters())


def test_the_named_shapes_are_sound() -> None:
    """Query heads share KV heads evenly."""
    assert all(shape.num_attention_heads % shape.num_key_value_heads == 0 for shape in SHAPES.values())
