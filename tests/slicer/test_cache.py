"""What slicing found is kept for the next start, and isn't run if anyone else may have written it."""

import logging
import os
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from pannier.slicer import default_cache_dir, slice_model
from pannier.slicer.cache import SOURCE, Untrusted, key_of, load_cut, store_cut
from pannier.slicer.cut import Cut
from pannier.slicer.rotary import freeze_rotary
from pannier.slicer.slicing import cut_model, join

from .small import assert_close, sliced_logits, small_config, small_model, some_ids, whole_logits


@pytest.fixture(scope="module")
def pieces() -> Cut:
    """A model in slices, whose rotary frequencies are a constant tensor and whose embeddings are tied."""
    return cut_model(frozen_model())


def frozen_model() -> PreTrainedModel:
    model = small_model("llama", num_hidden_layers=2, tie_word_embeddings=True)
    freeze_rotary(model, 64)
    return model


def test_a_stored_cut_is_the_same(pieces: Cut, tmp_path: Path) -> None:
    store_cut(tmp_path / "entry", pieces)
    loaded = load_cut(tmp_path / "entry")
    assert loaded is not None
    assert (loaded.calls, loaded.slices, loaded.source) == (pieces.calls, pieces.slices, pieces.source)
    assert loaded.constants.keys() == pieces.constants.keys()
    ids, model = some_ids(12), frozen_model()
    want = whole_logits(model, ids)
    assert_close(sliced_logits(join(loaded, model, 64), ids), want)


def test_what_is_not_there_is_none(tmp_path: Path) -> None:
    assert load_cut(tmp_path / "entry") is None


def test_a_store_replaces_what_was_there(pieces: Cut, tmp_path: Path) -> None:
    for _ in range(2):
        store_cut(tmp_path / "entry", pieces)
    assert [entry.name for entry in tmp_path.iterdir()] == ["entry"]


def test_source_that_changed_is_refused(pieces: Cut, tmp_path: Path) -> None:
    store_cut(tmp_path / "entry", pieces)
    with (tmp_path / "entry" / SOURCE).open("a") as file:
        file.write("\nraise SystemExit\n")
    with pytest.raises(Untrusted, match="has changed"):
        load_cut(tmp_path / "entry")


@pytest.mark.parametrize("name", ["", SOURCE], ids=["folder", "file"])
def test_what_others_can_write_is_refused(pieces: Cut, tmp_path: Path, name: str) -> None:
    store_cut(tmp_path / "entry", pieces)
    os.chmod(tmp_path / "entry" / name, 0o777)
    with pytest.raises(Untrusted, match="someone else"):
        load_cut(tmp_path / "entry")


def test_an_entry_is_for_its_owner_alone(pieces: Cut, tmp_path: Path) -> None:
    store_cut(tmp_path / "entry", pieces)
    assert [path.stat().st_mode & 0o077 for path in [tmp_path / "entry", *(tmp_path / "entry").iterdir()]] == [0] * 4


@pytest.mark.slow
def test_a_tampered_entry_is_sliced_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ids = some_ids(12)
    want = whole_logits(small_model("llama"), ids)
    slice_model(small_model("llama"), cache_dir=tmp_path)
    (source,) = tmp_path.rglob(SOURCE)
    source.write_text("raise SystemExit")
    with caplog.at_level(logging.WARNING):
        assert_close(sliced_logits(slice_model(small_model("llama"), cache_dir=tmp_path), ids), want)
    assert "slicing again" in caplog.text
    assert "SystemExit" not in source.read_text()


def test_a_second_start_traces_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = some_ids(12)
    want = sliced_logits(slice_model(small_model("llama"), cache_dir=tmp_path), ids)
    monkeypatch.delattr(torch.export, "export")
    assert_close(sliced_logits(slice_model(small_model("llama"), cache_dir=tmp_path), ids), want)


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    slice_model(small_model("llama", num_hidden_layers=2), cache_dir=tmp_path / "file" / "cache")
    assert "can't be kept" in caplog.text


def test_a_key_tells_settings_apart_but_not_origins() -> None:
    config = small_config("llama").to_dict()
    assert key_of(config) == key_of(config | {"_name_or_path": "elsewhere"})
    for change in ({"hidden_size": 96}, {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}):
        assert key_of(config) != key_of(config | change)
    assert key_of(config, dtype=torch.float32) != key_of(config, dtype=torch.bfloat16)


def test_the_default_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert default_cache_dir() == Path("/somewhere/pannier")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / ".cache" / "pannier"
    monkeypatch.setenv("HOME", str(tmp_path / "absent"))
    assert default_cache_dir().name == f"pannier-{os.getuid()}"
