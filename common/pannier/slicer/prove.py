"""Proves, for a type and all of its settings, that the sliced model computes what the model computes.

The proof is a comparison on a small random copy: two sequences, cut into chunks of unequal size, packed together, then
token by token, against the uncut model over each whole sequence under the library's own attention. Everything that
attention is told is tested by its absence being visible: sequences are longer than windows, sinks are not zero, and
withholding any one call's past must change the logits.
"""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from pannier.slicer.cache import Untrusted, key_of, read_own, write_own
from pannier.slicer.model import SlicedModel
from pannier.slicer.reference_attention import Part, Past, run_packed
from pannier.slicer.refusal import CannotSlice, Unsupported, one_line
from pannier.slicer.rotary import freeze_rotary
from pannier.slicer.shrink import LENGTH, RECIPES, shrink
from pannier.slicer.slicing import cut_model, join

log = logging.getLogger(__name__)

TOLERANCE = 1e-4  # of the largest logit
VISIBLE = 1e-3  # what withholding a call's past must change at least, of the largest logit
# How far each of the two sequences is after each step: chunks, then single tokens of both, of one, of the other.
STEPS = ((11, 7), (25, 28), (26, 29), (27, 30), (28, 31), (38, 32), (39, LENGTH), (LENGTH, LENGTH))
# Steps whose logits aren't all wanted: of these packed rows only.
ROWS: dict[int, list[int]] = {2: [], 3: [1]}


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
        with _own_seed():
            largest = check(_model(smaller))
    except Unsupported as reason:
        raise CannotSlice(config.model_type, _sentence(config, str(reason))) from reason
    try:
        write_own(file, json.dumps({"model_type": config.model_type, "largest_difference": largest}).encode())
    except OSError as error:
        log.warning("the proof can't be kept for the next start: %s", error)


def _sentence(config: PretrainedConfig, reason: str) -> str:
    """The reason, after what is known about the type that explains it."""
    model_class = AutoModelForCausalLM._model_mapping.get(type(config), None)
    if getattr(model_class, "_is_stateful", False):
        return f"has layers that keep a state of their own beside keys and values ({reason})"
    return reason


def check(model: PreTrainedModel) -> float:
    """Compares a small model, which is used up, with itself sliced: the largest difference, over the largest logit.

    Raises:
        Unsupported: they differ, or it can't be cut, or the comparison would prove nothing.
    """
    _randomise(model)
    sequences = torch.randint(LENGTH, 200, (2, LENGTH))
    with torch.no_grad():
        wanted = [model(ids[None], use_cache=False).logits[0] for ids in sequences]
    if not all(logits.isfinite().all() for logits in wanted):
        raise Unsupported("gives logits that aren't finite, so nothing can be compared")
    freeze_rotary(model, LENGTH)
    sliced = join(cut_model(model), model, LENGTH)
    with torch.inference_mode():
        _check_past_is_used(sliced, sequences[0], wanted[0])
        return _check_steps(sliced, sequences, wanted)


def _check_steps(model: SlicedModel, sequences: torch.Tensor, wanted: list[torch.Tensor]) -> float:
    """Runs both sequences through all steps, packed: the largest difference, over the largest logit."""
    pasts, done, largest = (Past(), Past()), (0, 0), 0.0
    for step, stops in enumerate(STEPS):
        spans = [(i, done[i], stops[i]) for i in (0, 1) if stops[i] > done[i]]
        parts = [Part(sequences[i], start, stop, pasts[i]) for i, start, stop in spans]
        want = torch.cat([wanted[i][start:stop] for i, start, stop in spans])
        rows = ROWS.get(step, list(reversed(range(len(want)))))
        got = run_packed(model, parts, rows)
        if got.shape != want[rows].shape:
            raise Unsupported(f"gives logits of shape {tuple(got.shape)} for {len(rows)} rows when it is sliced")
        if rows:
            largest = max(largest, _difference(got, want[rows]))
        done = stops
    if not largest <= TOLERANCE:
        raise Unsupported(f"gives other logits when it is sliced (they differ by {largest:.1e} of the largest)")
    return largest


def _check_past_is_used(model: SlicedModel, ids: torch.Tensor, wanted: torch.Tensor) -> None:
    """Withholds the past from one call after the other: a call for which that changes nothing wouldn't be proved."""
    past, split = Past(), LENGTH // 2
    run_packed(model, [Part(ids, 0, split, past)], [])
    for call in model.calls:
        forgetful = past.copy(withheld=call.index)
        got = run_packed(model, [Part(ids, split, split + 1, forgetful)], [0])
        if not _difference(got, wanted[split : split + 1]) > VISIBLE:
            raise Unsupported(f"gives the same logits without the past of attention call {call.index}")


def _difference(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max())


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
            return _runnable(config)
        except Exception as error:  # noqa: BLE001 (a model's own code, with sizes that it wasn't made for)
            reason = one_line(error)
    raise Unsupported(f"can't be made small enough for its proof ({reason})")


def _runnable(config: PretrainedConfig) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    model.train(False)
    with torch.no_grad():
        model(torch.randint(LENGTH, 200, (1, LENGTH)), use_cache=False)
    return model


def _randomise(model: PreTrainedModel) -> None:
    """Weights that let every part of the model matter: matrices that amplify a little, nothing zero, nothing equal."""
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim >= 2:
                weight.normal_(0, 1.6 * weight.shape[-1] ** -0.5)
            else:
                weight.add_(torch.randn_like(weight), alpha=0.4)
        stored = model.state_dict().keys()
        for name, buffer in model.named_buffers():
            if name in stored and buffer.is_floating_point():
                buffer.add_(torch.randn_like(buffer), alpha=0.1)


@contextmanager
def _own_seed() -> Iterator[None]:
    """The same random numbers each time, and none taken from the caller's."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def _is_proved(file: Path) -> bool:
    if not file.exists():
        return False
    try:
        return bool(read_own(file))
    except Untrusted as reason:
        log.warning("%s: proving again", reason)
        return False
