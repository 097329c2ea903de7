"""Proves, for a type with all of its settings, that the sliced model computes what the model computes.

The proof is a comparison (see `compare`) on a small copy with random weights. It is kept under a hash over the small
configurations, so models that differ in sizes only share it, and over all versions.
"""

import json
import logging
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from pannier.slicer.cache import Untrusted, key_of, read_own, write_own
from pannier.slicer.compare import Differs, compare
from pannier.slicer.refusal import CannotSlice, Unsupported, one_line
from pannier.slicer.shrink import LENGTH, RECIPES, shrink

log = logging.getLogger(__name__)


def prove(config: PretrainedConfig, max_model_len: int, cache_dir: Path) -> None:
    """Returns if models with this configuration may be sliced.

    Raises:
        CannotSlice: they may not, and why.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise CannotSlice(config.model_type, "is not a causal decoder, it has an encoder")
    smaller = _shrunk(config, max_model_len)
    file = cache_dir / "proofs" / f"{key_of({'configs': [c.to_dict() for c in smaller]})}.json"
    if _is_proved(file):
        return
    try:
        largest = _largest_difference(smaller)
    except Unsupported as reason:
        raise CannotSlice(config.model_type, _sentence(config, str(reason))) from reason
    try:
        write_own(file, json.dumps({"model_type": config.model_type, "largest_difference": largest}).encode())
    except OSError as error:
        log.warning("the proof can't be kept for the next start: %s", error)


def _largest_difference(configs: list[PretrainedConfig]) -> float:
    """The difference between the uncut and the sliced model, small enough in one comparison, or else in two more.

    Where a model chooses (experts, above all) two choices may be so close that rounding decides: about one comparison
    in three hundred then shows a difference that means nothing. A difference that means something shows each time.
    """
    try:
        return _compare(configs, seed=0)
    except Differs as difference:
        log.info("%s; comparing twice more", difference)
        return max(_compare(configs, seed) for seed in (1, 2))


def _compare(configs: list[PretrainedConfig], seed: int) -> float:
    """One comparison, with its own random numbers, and none taken from the caller's."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return compare(_model(configs))


def _sentence(config: PretrainedConfig, reason: str) -> str:
    """The reason, after what is known about the type that explains it."""
    model_class = AutoModelForCausalLM._model_mapping.get(type(config), None)
    if getattr(model_class, "_is_stateful", False):
        return f"has layers that keep a state of their own beside keys and values ({reason})"
    return reason


def _shrunk(config: PretrainedConfig, max_model_len: int) -> list[PretrainedConfig]:
    """Small configurations to try, best first."""
    smaller = []
    for recipe in RECIPES:
        try:
            smaller.append(shrink(config, max_model_len, recipe))
        except Exception as error:  # noqa: BLE001 (a type's own checks of its settings may raise anything)
            log.debug("%s: %s: %s", config.model_type, recipe, one_line(error))
    return smaller


def _model(configs: list[PretrainedConfig]) -> PreTrainedModel:
    """The first of the configurations as a model that runs, with the library's plainest attention."""
    reason = "its settings are refused"
    for config in configs:
        try:
            return runnable(config)
        except Exception as error:  # noqa: BLE001 (a model's own code, with sizes that it wasn't made for)
            reason = one_line(error)
    raise Unsupported(f"can't be made small enough for its proof ({reason})")


def runnable(config: PretrainedConfig) -> PreTrainedModel:
    """A random model of this configuration, once it has run."""
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    model.train(False)
    with torch.no_grad():
        model(torch.randint(LENGTH, 200, (1, LENGTH)), use_cache=False)
    return model


def _is_proved(file: Path) -> bool:
    if not file.exists():
        return False
    try:
        return bool(read_own(file))
    except Untrusted as reason:
        log.warning("%s: proving again", reason)
        return False
