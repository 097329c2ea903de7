"""Compares a small random model with itself sliced: the heart of a proof.

Two sequences, in chunks of unequal size, packed together, then token by token, against the uncut model over each whole
sequence under the library's own attention. Everything that attention is told is tested by its absence being visible:
sequences are longer than windows, sinks are not zero, and withholding any one call's past must change the logits.

How close is close enough? Slices round differently from the whole, and a deep model amplifies that. So the model is
asked first how far its logits move when each of its weights moves by one rounding.
"""

import math

import torch
from transformers import PreTrainedModel

from pannier.slicer.model import SlicedModel
from pannier.slicer.reference_attention import Part, Past, run_packed
from pannier.slicer.refusal import Unsupported
from pannier.slicer.rotary import freeze_rotary
from pannier.slicer.shrink import LENGTH
from pannier.slicer.slicing import cut_model, join

# All differences are relative to the largest logit.
LEAST_TOLERANCE = 1e-4
MOST_TOLERANCE = 3e-3
PER_ROUNDING = 10  # the tolerance is as many times what one rounding of all weights does
VISIBLE = 10  # withholding a call's past must change logits by as many times the tolerance
GAINS = (1.6, 1.1, 0.8)  # what a matrix does to the length of a vector; the first that a model can bear is taken
# How far each of the two sequences is after each step: chunks, then single tokens of both, of one, of the other.
STEPS = ((11, 7), (25, 28), (26, 29), (27, 30), (28, 31), (38, 32), (39, LENGTH), (LENGTH, LENGTH))
# Steps whose logits aren't all wanted: of these packed rows only.
ROWS: dict[int, list[int]] = {2: [], 3: [1]}


class Differs(Unsupported):
    """Raised when the sliced model gives other logits."""


def compare(model: PreTrainedModel) -> float:
    """Compares `model`, which is used up, with itself sliced: the largest difference.

    Raises:
        Differs: they differ.
        Unsupported: it can't be cut, or the comparison would prove nothing.
    """
    sequences = torch.randint(LENGTH, 200, (2, LENGTH))
    wanted, tolerance = _wanted(model, sequences)
    freeze_rotary(model, LENGTH)
    sliced = join(cut_model(model), model, LENGTH)
    with torch.inference_mode():
        difference = _run_steps(sliced, sequences, wanted)
        if not difference <= tolerance:
            raise Differs(f"gives other logits when it is sliced (they differ by {difference:.1e} of the largest)")
        _check_past_is_used(sliced, sequences[0], wanted[0], VISIBLE * tolerance)
    return difference


def _wanted(model: PreTrainedModel, sequences: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Random weights, what the uncut model says with them [2, T, V], and how much of a difference may be rounding."""
    for gain in GAINS:
        _randomise(model, gain)
        before = _whole_logits(model, sequences)
        _round_weights(model)
        wanted = _whole_logits(model, sequences)
        tolerance = max(LEAST_TOLERANCE, PER_ROUNDING * _difference(before, wanted))
        if wanted.isfinite().all() and tolerance <= MOST_TOLERANCE:
            return wanted, tolerance
    raise Unsupported("can't be compared: its logits aren't finite, or change with a mere rounding of its weights")


def _whole_logits(model: PreTrainedModel, sequences: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return torch.stack([model(ids[None], use_cache=False).logits[0] for ids in sequences])


def _randomise(model: PreTrainedModel, gain: float) -> None:
    """Weights that let every part of the model matter: nothing small, nothing zero, nothing equal."""
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim >= 2:
                weight.normal_(0, gain * weight.shape[-1] ** -0.5)
            else:
                weight.add_(torch.randn_like(weight), alpha=0.4)
        stored = model.state_dict().keys()
        for name, buffer in model.named_buffers():
            if name in stored and buffer.is_floating_point():
                buffer.add_(torch.randn_like(buffer), alpha=0.1)


def _round_weights(model: PreTrainedModel) -> None:
    """Moves about half of the weights by one rounding."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1 + torch.randn_like(weight).sign() * (torch.finfo(weight.dtype).eps / 2))


def _run_steps(model: SlicedModel, sequences: torch.Tensor, wanted: torch.Tensor) -> float:
    """Runs both sequences through all steps, packed: the largest difference."""
    pasts, done, largest = (Past(), Past()), (0, 0), 0.0
    for step, stops in enumerate(STEPS):
        spans = [(i, done[i], stops[i]) for i in (0, 1) if stops[i] > done[i]]
        parts = [Part(sequences[i], start, stop, pasts[i]) for i, start, stop in spans]
        want = torch.cat([wanted[i, start:stop] for i, start, stop in spans])
        rows = ROWS.get(step, list(reversed(range(len(want)))))
        got = run_packed(model, parts, rows)
        if got.shape != want[rows].shape:
            raise Unsupported(f"gives logits of shape {tuple(got.shape)} for {len(rows)} rows when it is sliced")
        if rows:
            largest = max(largest, _difference(got, want[rows]))
        done = stops
    return largest


def _check_past_is_used(model: SlicedModel, ids: torch.Tensor, wanted: torch.Tensor, visible: float) -> None:
    """Withholds the past from one call after the other: a call for which that changes nothing wouldn't be proved."""
    past, split = Past(), LENGTH // 2
    run_packed(model, [Part(ids, 0, split, past)], [])
    for call in model.calls:
        forgetful = past.copy(withheld=call.index)
        got = run_packed(model, [Part(ids, split, split + 1, forgetful)], [0])
        if not _difference(got, wanted[split : split + 1]) > visible:
            raise Unsupported(f"gives the same logits without the past of attention call {call.index}")


def _difference(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest difference, over the largest logit; infinite if it isn't a number."""
    difference = float((got - want).abs().max() / want.abs().max())
    return difference if math.isfinite(difference) else math.inf
