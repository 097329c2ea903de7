"""From a folder of weights, or a model in memory, to a `SlicedModel`: refuse, prove, load, cut or use the cache."""

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from pannier.slicer.cache import Untrusted, default_cache_dir, key_of, load_cut, store_cut
from pannier.slicer.cut import Cut
from pannier.slicer.model import SlicedModel
from pannier.slicer.prove import prove
from pannier.slicer.refusal import CannotSlice, Unsupported, one_line
from pannier.slicer.rotary import freeze_rotary
from pannier.slicer.slicing import cut_model, join
from pannier.slicer.stage import WHOLE, Stage

log = logging.getLogger(__name__)
Progress = Callable[[str], None]


class CannotLoad(Exception):
    """Raised when there is no model at a path, or its weights are in a form that can't be used."""


def load(
    path: str | Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    max_model_len: int | None = None,
    stage: Stage = WHOLE,
    cache_dir: Path | None = None,
    progress: Progress = log.info,
) -> SlicedModel:
    """Loads a model's weights and slices it.

    All of them pass through the host's memory; of one stage of several, only its own go to the device and are kept.

    Args:
        path: a folder that transformers can load, or the name of a model on a hub that can be reached.
        dtype: what weights are loaded as.
        device: where they go.
        max_model_len: positions lie below it; None for what the model's configuration says.
        stage: which part of it is wanted.
        cache_dir: where proofs and slices are kept; None for `default_cache_dir()`.
        progress: told, in a few words, what is being done.

    Raises:
        CannotLoad: there is no model at `path`, or it isn't whole, or it is quantised or pickled.
        CannotSlice: the model can't be served with its attention elsewhere.
        ValueError: `max_model_len` is more than the model can do, or it has too few attention calls for the stages.
    """
    config = _config(str(path))
    length = longest(config, max_model_len)
    cache_dir = cache_dir or default_cache_dir()
    progress(f"proving {config.model_type}")
    prove(config, length, cache_dir)
    progress(f"loading weights from {path}")
    model = _weights(str(path), config, dtype)
    progress("slicing")
    return _slice_proved(model, length, cache_dir, stage, torch.device(device))


def slice_model(
    model: PreTrainedModel,
    *,
    device: torch.device | str | None = None,
    max_model_len: int | None = None,
    stage: Stage = WHOLE,
    cache_dir: Path | None = None,
) -> SlicedModel:
    """Slices a model that is in memory. Its weights are shared, and it is left unfit for anything else.

    Raises:
        CannotSlice: the model can't be served with its attention elsewhere.
        ValueError: `max_model_len` is more than the model can do, or it has too few attention calls for the stages.
    """
    if not type(model).__module__.startswith("transformers."):
        raise CannotSlice(model.config.model_type, "is no class of the library, whose classes alone are proved")
    length = longest(model.config, max_model_len)
    cache_dir = cache_dir or default_cache_dir()
    prove(model.config, length, cache_dir)
    return _slice_proved(model, length, cache_dir, stage, torch.device(device or model.device))


def longest(config: PretrainedConfig, asked: int | None) -> int:
    """The positions that a sliced model is to allow.

    Raises:
        ValueError: more were asked for than the model has, or none were and the configuration doesn't say.
    """
    has = _decoder(config, "max_position_embeddings")
    if asked is None and has is None:
        raise ValueError(f"{config.model_type}: its configuration has no longest length, give a max_model_len")
    if asked is not None and has is not None and asked > has * _stretch(config):
        raise ValueError(f"{config.model_type}: a max_model_len of {asked} is more than the model's {has} positions")
    return int(has if asked is None else asked)


def _stretch(config: PretrainedConfig) -> float:
    """How many times its positions a model can do: more than once if its rotary embeddings adapt themselves."""
    rotary = _decoder(config, "rope_parameters") or {}
    return float(rotary.get("factor", 1.0)) if "dynamic" in str(rotary.get("rope_type")) else 1.0


def _decoder(config: PretrainedConfig, name: str) -> Any:
    """A setting of the text decoder, or None."""
    with suppress(ValueError):  # several decoders in one model: look at the whole
        config = config.get_text_config(decoder=True)
    return getattr(config, name, None)


def _config(path: str) -> PretrainedConfig:
    if path.endswith(".gguf"):
        raise CannotLoad(f"{path}: is a GGUF file, only unquantised weights can be loaded")
    if os.path.isabs(path) or path.startswith((".", "~")):
        path = os.path.expanduser(path)
        if not os.path.isdir(path):
            raise CannotLoad(f"{path}: there is no such folder")
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise CannotLoad(f"{path}: no model can be loaded from it ({one_line(error)})") from error
    if quantised := getattr(config, "quantization_config", None):
        method = quantised.get("quant_method", "?") if isinstance(quantised, dict) else type(quantised).__name__
        raise CannotLoad(f"{path}: its weights are quantised ({method}), only unquantised weights can be loaded")
    return config


def _weights(path: str, config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model with its weights, all of which must be there, and none of them pickled."""
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=dtype, use_safetensors=True, output_loading_info=True
        )
    except (OSError, SafetensorError) as error:
        raise CannotLoad(f"{path}: its weights can't be loaded ({one_line(error)})") from error
    model: PreTrainedModel
    model, found = loaded
    for problem in ("missing_keys", "mismatched_keys"):
        if names := sorted(map(str, found[problem])):
            raise CannotLoad(f"{path}: {len(names)} of its weights are {problem.split('_')[0]}, such as {names[0]}")
    return model


def _slice_proved(
    model: PreTrainedModel, max_model_len: int, cache_dir: Path, stage: Stage, device: torch.device
) -> SlicedModel:
    if stage == WHOLE:
        torch.nn.Module.to(model, device)  # else the device may have no room for what other stages run
    model.train(False)
    freeze_rotary(model, max_model_len)
    return join(_cut_or_cached(model, max_model_len, cache_dir), model, max_model_len, stage, device)


def _cut_or_cached(model: PreTrainedModel, max_model_len: int, cache_dir: Path) -> Cut:
    others = {"class": type(model), "dtype": model.dtype, "device": model.device.type, "length": max_model_len}
    folder = cache_dir / "slices" / key_of(model.config.to_dict(), **others)
    try:
        if cached := load_cut(folder):
            return cached
    except Untrusted as reason:
        log.warning("%s: slicing again", reason)
    try:
        pieces = cut_model(model)
    except Unsupported as reason:
        raise CannotSlice(model.config.model_type, str(reason)) from reason
    try:
        store_cut(folder, pieces)
    except OSError as error:
        log.warning("the slices can't be kept for the next start: %s", error)
    return pieces
