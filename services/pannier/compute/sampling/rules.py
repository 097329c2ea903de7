"""What changes logits before a draw: masks, bans, biases, penalties."""

from array import array
from collections.abc import Sequence

import torch

from pannier.compute.sampling.state import State
from pannier.wire import messages as m


def apply_rules(
    x: torch.Tensor, samples: Sequence[m.Sample], states: Sequence[State | None], masks: torch.Tensor
) -> None:
    """Change logits x fp32 [B, V] in place, by masks int32 [M, W] and each sample's state."""
    _mask(x, [sample.mask for sample in samples], masks)
    ruled = [(row, state) for row, state in enumerate(states) if state is not None]
    if ruled:
        _ban(x, ruled)
        _add_bias(x, ruled)
        _penalise(x, [(row, state) for row, state in ruled if state.occurrences is not None])


Ruled = Sequence[tuple[int, State]]


def _mask(x: torch.Tensor, masks_of: Sequence[int], masks: torch.Tensor) -> None:
    rows = [row for row, mask in enumerate(masks_of) if mask >= 0]
    if rows:
        words = masks[[masks_of[row] for row in rows]].to(x.device)
        shifts = torch.arange(32, dtype=torch.int32, device=x.device)
        is_out = (words[:, :, None] >> shifts & 1 == 0).flatten(1)[:, : x.shape[-1]]
        x[rows] = x[rows].masked_fill_(is_out, -torch.inf)


def _ban(x: torch.Tensor, ruled: Ruled) -> None:
    banned = [(row, state.banned()) for row, state in ruled]
    places = _places(x, [(row, array("i", tokens)) for row, tokens in banned])
    x.view(-1)[places] = -torch.inf


def _add_bias(x: torch.Tensor, ruled: Ruled) -> None:
    bias = array("f")
    for _, state in ruled:
        bias.extend(state.bias)
    if bias:
        places = _places(x, [(row, state.bias_tokens) for row, state in ruled])
        x.view(-1).index_add_(0, places, _tensor(bias, torch.float32).to(x.device))


def _penalise(x: torch.Tensor, ruled: Ruled) -> None:
    """Only where tokens occurred: they are few beside the vocabulary."""
    if not ruled:
        return
    occurrences = [(row, state.occurrences) for row, state in ruled if state.occurrences is not None]
    places = _places(x, [(row, of_row.tokens) for row, of_row in occurrences])
    counts = array("i")
    for _, of_row in occurrences:
        counts.extend(of_row.counts)
    times = _tensor(counts, torch.int32).to(x.device, torch.float32)
    lengths = torch.tensor([len(of_row.tokens) for _, of_row in occurrences])
    factors = torch.tensor([_factors(state.rules.penalties) for _, state in ruled], dtype=torch.float32)
    repetition, presence, frequency = factors.repeat_interleave(lengths, 0).to(x.device).unbind(1)
    logits = x.view(-1)[places]
    logits = torch.where(logits > 0, logits / repetition, logits * repetition)
    x.view(-1)[places] = logits - frequency * times - presence * (times > 0)


def _factors(penalties: m.Penalties) -> tuple[float, float, float]:
    return penalties.repetition, penalties.presence, penalties.frequency


def _places(x: torch.Tensor, tokens: Sequence[tuple[int, "array[int]"]]) -> torch.Tensor:
    """Where in flattened x [B, V] these tokens of these rows are, int64 [sum of lengths]."""
    flat = array("i")
    for _, of_row in tokens:
        flat.extend(of_row)
    lengths = torch.tensor([len(of_row) for _, of_row in tokens])
    starts = torch.tensor([row * x.shape[-1] for row, _ in tokens]).repeat_interleave(lengths)
    return (starts + _tensor(flat, torch.int32)).to(x.device)


def _tensor(numbers: "array[int] | array[float]", dtype: torch.dtype) -> torch.Tensor:
    """The array's own memory; number by number torch would take longer than for all the rest."""
    return torch.frombuffer(numbers, dtype=dtype) if numbers else torch.empty(0, dtype=dtype)
