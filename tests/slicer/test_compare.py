"""A proof fails if attention is told anything that isn't so."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, PreTrainedModel

from pannier.slicer import Call, CannotSlice, compare
from pannier.slicer.cut import Cut
from pannier.slicer.prove import prove, runnable
from pannier.slicer.refusal import Unsupported
from pannier.slicer.shrink import RECIPES, shrink
from pannier.slicer.slicing import cut_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

TYPES = ("gpt_oss", "gemma2")
Change = Callable[[Call], Call]


def small(model_type: str) -> PreTrainedModel:
    torch.manual_seed(1)
    config = shrink(CONFIG_MAPPING[model_type](), 2048, RECIPES[0])
    return runnable(config)


@pytest.fixture(scope="module")
def cuts() -> dict[str, Cut]:
    return {model_type: cut_model(small(model_type)) for model_type in TYPES}


def window(change: Callable[[int], int]) -> Change:
    return lambda call: replace(call, window=change(call.window)) if call.window else call


CHANGES: dict[str, tuple[str, Change]] = {
    "no window": ("gpt_oss", window(lambda _: 0)),
    "a wider window": ("gpt_oss", window(lambda size: size + 1)),
    "a narrower window": ("gpt_oss", window(lambda size: size - 1)),
    "windows everywhere": ("gpt_oss", lambda call: replace(call, window=6)),
    "no sinks": ("gpt_oss", lambda call: replace(call, sinks=None)),
    "another scale": ("gpt_oss", lambda call: replace(call, scale=call.scale * 1.05)),
    "no soft-cap": ("gemma2", lambda call: replace(call, softcap=0.0)),
    "a softer cap": ("gemma2", lambda call: replace(call, softcap=call.softcap / 4)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_attention_told_otherwise_is_found(name: str, cuts: dict[str, Cut], monkeypatch: pytest.MonkeyPatch) -> None:
    model_type, change = CHANGES[name]
    pieces = replace(cuts[model_type], calls=tuple(change(call) for call in cuts[model_type].calls))
    monkeypatch.setattr(compare, "cut_model", lambda _: pieces)
    with pytest.raises(Unsupported, match="other logits"):
        compare.compare(small(model_type))


@pytest.mark.parametrize("model_type", TYPES)
def test_attention_told_what_is_so_passes(
    model_type: str, cuts: dict[str, Cut], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "cut_model", lambda _: cuts[model_type])
    assert compare.compare(small(model_type)) < 1e-5


@pytest.mark.parametrize("other", ["torch.sin", "torch.log"], ids=["number", "nan"])
def test_a_slice_that_computes_something_else_is_found(
    other: str, cuts: dict[str, Cut], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = cuts["gemma2"].source
    assert "= aten_tanh_default(" in source
    monkeypatch.setattr(
        compare, "cut_model", lambda _: replace(cuts["gemma2"], source=source.replace("torch.tanh", other))
    )
    with pytest.raises(Unsupported, match="other logits"):
        compare.compare(small("gemma2"))


def test_layers_with_a_state_of_their_own_are_found(tmp_path: Path) -> None:
    """Convolutions over tokens leave the number and the kind of attention calls as it is."""
    layers: dict[str, Any] = {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2}
    with pytest.raises(CannotSlice, match="other logits"):
        prove(CONFIG_MAPPING["lfm2"](**layers), 2048, tmp_path)


@pytest.mark.parametrize(("differing", "proved"), [({0}, True), ({0, 1}, False), ({0, 2}, False)])
def test_a_difference_must_not_show_again(
    differing: set[int], proved: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One may be two experts that are equally good but for rounding."""
    seeds: list[int] = []

    def compared(_: PreTrainedModel) -> float:
        seeds.append(torch.initial_seed())
        if seeds[-1] in differing:
            raise compare.Differs("gives other logits")
        return 1e-6

    monkeypatch.setattr("pannier.slicer.prove.compare", compared)
    config = CONFIG_MAPPING["llama"]()
    if proved:
        prove(config, 2048, tmp_path)
        assert seeds == [0, 1, 2]
    else:
        with pytest.raises(CannotSlice, match="other logits"):
            prove(config, 2048, tmp_path)
