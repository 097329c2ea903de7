"""The largest numbers of a model: float16 ends at 65,504, where bfloat16 and float32 go on."""

from collections.abc import Iterable

import torch

from pannier.ops.chunk_attention import chunk_attention
from pannier.ops.merge_partials import merge_sinks
from pannier.runtime.dtype_policy import Range
from pannier.slicer import Attend, SlicedModel
from pannier.slicer.cut import LOGITS
from pannier.slicer.export import IDS, POSITIONS
from pannier.slicer.model import Values

SAMPLE_ROWS = 64


def range_of(model: SlicedModel) -> Range:
    """The largest weight, and the largest activation on a sample where this stage begins with token ids."""
    with torch.inference_mode():
        weight = _largest(model.weights.values())
        return Range(weight, _largest_activation(model) if not model.span.start else 0.0)


def _largest_activation(model: SlicedModel) -> float:
    """Of what slices give, on tokens from all over the vocabulary; what overflows inside is infinite behind them."""
    rows = min(SAMPLE_ROWS, model.max_model_len)
    ids = torch.linspace(0, model.vocab_size - 1, rows, device=model.device).long()
    values: Values = {IDS: ids, POSITIONS: torch.arange(rows, device=model.device)}
    going, largest = model.run_stage(values), 0.0
    ask = next(going)
    while True:
        output = _attend(model, ask)
        largest = max(largest, _largest((ask.q, ask.k, ask.v, output, *_tensors(values))))
        try:
            ask = going.send(output)
        except StopIteration:
            break
    if model.span.stop == len(model.slices):
        values[LOGITS] = model.head(values)(torch.tensor([rows - 1]))
    return max(largest, _largest(_tensors(values)))


def _attend(model: SlicedModel, ask: Attend) -> torch.Tensor:
    call, sinks = ask.call, model.sinks(ask.call)
    o, lse = chunk_attention(
        ask.q, ask.k, ask.v, [len(ask.q)], scale=call.scale, window=call.window, softcap=call.softcap
    )
    if sinks is not None:
        o, _ = merge_sinks(o, lse, sinks)
    return o.to(model.dtype)


def _tensors(values: Values) -> list[torch.Tensor]:
    return [value for value in values.values() if isinstance(value, torch.Tensor) and value.is_floating_point()]


def _largest(tensors: Iterable[torch.Tensor]) -> float:
    """Without signs; what is no number counts as infinite."""
    largest = 0.0
    for tensor in tensors:
        if tensor.numel() and tensor.is_floating_point():
            found = float(tensor.abs().amax())
            largest = max(largest, found if found == found else float("inf"))
    return largest
