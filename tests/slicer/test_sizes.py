from dataclasses import asdict, replace
from pathlib import Path

import pytest
from transformers import BertConfig, Gemma3TextConfig, LlamaConfig, MambaConfig, PretrainedConfig, Qwen3MoeConfig

from pannier.cli.plan_inputs import shape_sizes
from pannier.planner.sizes import CallSize, ModelSizes
from pannier.runtime.random_models import SHAPES
from pannier.slicer.load import CannotLoad
from pannier.slicer.sizes import sizes_of


def sizes(folder: Path, config: PretrainedConfig) -> ModelSizes:
    config.save_pretrained(folder)
    return sizes_of(folder)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_configuration_gives_what_the_shape_says(shape: str, tmp_path: Path) -> None:
    """Tied embeddings and untied ones; no weights are made, however large the model."""
    found = sizes(tmp_path, LlamaConfig(**asdict(SHAPES[shape])))
    assert replace(found, name=shape) == shape_sizes(shape, SHAPES[shape])


def test_windows_are_those_of_the_layers_that_have_one(tmp_path: Path) -> None:
    found = sizes(tmp_path, Gemma3TextConfig(num_hidden_layers=12, sliding_window=512))
    windows = [call.window for call in found.calls]
    assert (len(windows), windows.count(512), windows.count(0)) == (12, 10, 2)
    assert {replace(call, window=0) for call in found.calls} == {CallSize(8, 4, 256, 256)}


def test_experts_are_counted_apart(tmp_path: Path) -> None:
    """Three matrices of each expert; what is read in any case is the rest without the table of embeddings."""
    config = Qwen3MoeConfig(num_hidden_layers=2, num_experts=16, num_experts_per_tok=4)
    found = sizes(tmp_path, config)
    assert (found.experts, found.chosen) == (16, 4)
    assert found.expert == 2 * 16 * 3 * config.hidden_size * config.moe_intermediate_size
    assert found.parameters == found.read + found.expert + config.vocab_size * config.hidden_size


@pytest.mark.parametrize(
    ("config", "says"),
    [(BertConfig(), "asks for a bidirectional mask"), (MambaConfig(num_hidden_layers=2), "makes no attention call")],
    ids=["bert", "mamba"],
)
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_offloaded_has_no_plan(config: PretrainedConfig, says: str, tmp_path: Path) -> None:
    with pytest.raises(CannotLoad, match=says):
        sizes(tmp_path, config)


def test_a_configuration_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CannotLoad, match="its sizes can't be found"):
        sizes_of(tmp_path)
