"""A model's slices may run in several places, in order: the stages together are the model, and each is only a part."""

from pathlib import Path
from typing import Any

import pytest
import torch

from pannier.slicer import SlicedModel, Stage, slice_model
from pannier.slicer.model import Values

from .small import assert_close, drive, small_model, some_ids, whole_logits

LENGTH = 17
SLIDING = {"head_dim": 16, "sliding_window": 7, "num_hidden_layers": 5}


def stages_of(model_type: str, count: int, cache_dir: Path, **settings: Any) -> list[SlicedModel]:
    """Every stage of one model, each from its own copy of it."""
    return [
        slice_model(small_model(model_type, **settings), stage=Stage(number, count), cache_dir=cache_dir)
        for number in range(count)
    ]


def run_stages(stages: list[SlicedModel], ids: torch.Tensor) -> torch.Tensor:
    """Logits of all rows; a stage is given what the one before it passes on, and nothing else."""
    positions = torch.arange(len(ids))
    values: Values = {"ids": ids}
    for stage in stages:
        values["positions"] = positions
        drive(stage, stage.run_stage(values), sizes=(len(ids),))
        values = values if stage is stages[-1] else {name: values[name] for name in stage.passes_on}
    return stages[-1].head(values)(positions)


@pytest.mark.parametrize(
    ("model_type", "count", "settings"),
    [
        ("llama", 2, {}),
        ("llama", 3, {"tie_word_embeddings": True}),
        pytest.param("gpt2", 2, {}, marks=pytest.mark.slow),
        pytest.param("gemma3_text", 3, SLIDING, marks=pytest.mark.slow),
        pytest.param(
            "gpt_oss", 2, SLIDING | {"num_local_experts": 4, "num_experts_per_tok": 2}, marks=pytest.mark.slow
        ),
    ],
)
@pytest.mark.timeout(120)
def test_stages_in_order_are_the_model(model_type: str, count: int, settings: dict[str, Any], cache_dir: Path) -> None:
    ids = some_ids(LENGTH)
    want = whole_logits(small_model(model_type, **settings), ids)
    stages = stages_of(model_type, count, cache_dir, **settings)
    assert_close(run_stages(stages, ids), want)
    assert [stage.takes_on for stage in stages[1:]] == [stage.passes_on for stage in stages[:-1]]
    assert [index for stage in stages for index in stage.span] == list(range(len(stages[0].slices)))


def test_a_stage_keeps_no_weights_but_its_own(cache_dir: Path) -> None:
    stages = stages_of("llama", 2, cache_dir, num_hidden_layers=4)
    whole = slice_model(small_model("llama", num_hidden_layers=4), cache_dir=cache_dir)
    names = [set(stage.weights) for stage in stages]
    assert names[0] | names[1] == set(whole.weights)
    assert not any("layers" in name or "embed" in name or "lm_head" in name for name in names[0] & names[1])
    assert sum(stage.weight_bytes for stage in stages) < 1.01 * whole.weight_bytes


def test_the_largest_stage_is_as_small_as_can_be(cache_dir: Path) -> None:
    """Slices of equal layers, and a head that weighs as much as several of them: they make way for it."""
    stages = stages_of("llama", 2, cache_dir, num_hidden_layers=6, vocab_size=1200, tie_word_embeddings=True)
    sizes = [stage.weight_bytes for stage in stages]
    layer = 48 * (48 * 2 + 16 * 2 + 96 * 3) * 4
    assert abs(sizes[0] - sizes[1]) <= layer


def test_more_stages_than_attention_calls_are_refused(cache_dir: Path) -> None:
    with pytest.raises(ValueError, match="4 stages are asked for, and the model has 3 attention calls"):
        slice_model(small_model("llama"), stage=Stage(3, 4), cache_dir=cache_dir)
