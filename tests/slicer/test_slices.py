"""A sliced model runs as one step of packed rows, says what the uncut model says, and keeps nothing."""

import gc
import weakref
from pathlib import Path

import pytest
import torch

from pannier.slicer import Attend, SlicedModel, slice_model

from .small import assert_close, drive, sliced_logits, small_model, some_ids, whole_logits

CutUp = tuple[SlicedModel, torch.Tensor, torch.Tensor]


@pytest.fixture(scope="module")
def cut_up(cache_dir: Path) -> CutUp:
    """A sliced model, token ids, and the logits that the uncut model has for them."""
    model, ids = small_model("llama"), some_ids(17)
    want = whole_logits(model, ids)
    return slice_model(model, cache_dir=cache_dir), ids, want


@pytest.mark.parametrize("layers", [4, pytest.param(30, marks=[pytest.mark.slow, pytest.mark.timeout(300)])])
def test_equal_layers_share_one_function(layers: int, cache_dir: Path) -> None:
    sliced = slice_model(small_model("llama", num_hidden_layers=layers), cache_dir=cache_dir)
    assert len(sliced.calls) == layers
    assert len(sliced.slices) == layers + 1
    assert len({piece.function for piece in sliced.slices}) == 3


def test_logits_are_those_of_the_uncut_model(cut_up: CutUp) -> None:
    sliced, ids, want = cut_up
    assert_close(sliced_logits(sliced, ids), want)


@pytest.mark.parametrize("rows", [[], [16], [3, 3, 0], list(range(17))], ids=["none", "last", "any-order", "all"])
def test_only_wanted_rows_have_logits(cut_up: CutUp, rows: list[int]) -> None:
    sliced, ids, want = cut_up
    got = sliced_logits(sliced, ids, torch.tensor(rows, dtype=torch.int64))
    assert got.shape == (len(rows), sliced.vocab_size)
    if rows:
        assert_close(got, want[rows])


def test_one_row_alone(cut_up: CutUp) -> None:
    sliced, ids, want = cut_up
    assert_close(sliced_logits(sliced, ids[:1]), want[:1])


def test_runs_in_inference_mode(cut_up: CutUp) -> None:
    sliced, ids, want = cut_up
    with torch.inference_mode():
        got = sliced_logits(sliced, ids)
    assert got.is_inference()
    assert_close(got, want)


def test_calls_say_what_attention_has_to_do(cut_up: CutUp) -> None:
    sliced, ids, _ = cut_up
    asked = next(sliced.run(ids, torch.arange(17), torch.arange(17)))
    assert isinstance(asked, Attend)
    assert asked.call is sliced.calls[0]
    assert [call.index for call in sliced.calls] == [0, 1, 2]
    assert (asked.q.shape, asked.k.shape, asked.v.shape) == ((17, 6, 8), (17, 2, 8), (17, 2, 8))
    assert (asked.call.q_heads, asked.call.kv_heads, asked.call.k_size, asked.call.v_size) == (6, 2, 8, 8)
    assert asked.call.scale == pytest.approx(8**-0.5)
    assert (asked.call.window, asked.call.softcap, sliced.sinks(asked.call)) == (0, 0, None)


def test_weights_are_shared_with_the_model(cache_dir: Path) -> None:
    model = small_model("llama", tie_word_embeddings=True)
    sliced = slice_model(model, cache_dir=cache_dir)
    pointers = {weight.data_ptr() for weight in model.parameters()}
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    assert {sliced.weights[name].data_ptr() for name in sliced.weights if name in names} <= pointers


def test_a_query_is_freed_while_attention_is_awaited(cut_up: CutUp) -> None:
    sliced, ids, _ = cut_up
    running = sliced.run(ids, torch.arange(17), torch.arange(17))
    asked = next(running)
    query, output = weakref.ref(asked.q), torch.zeros(17, 6, 8)
    del asked
    running.send(output)
    gc.collect()
    assert query() is None


def test_source_has_neither_assertions_nor_copies(cut_up: CutUp) -> None:
    source = cut_up[0].source
    for unwanted in ("assert_", "dropout", "clone", "detach", "causal_mask", "attend"):
        assert unwanted not in source


def test_rows_of_two_sequences_may_be_packed(cut_up: CutUp) -> None:
    """Rows see each other through attention only, and positions tell where they are."""
    sliced, ids, want = cut_up
    positions = torch.cat([torch.arange(5), torch.arange(9)])
    got = drive(sliced, sliced.run(ids[positions], positions, torch.arange(14)), sizes=(5, 9))
    assert got is not None
    assert_close(got[:5], want[:5])
    assert_close(got[5:], want[:9])
