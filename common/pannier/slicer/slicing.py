"""From a model in memory to slices that run: freeze, trace, cut, and join with the weights."""

import torch
from transformers import PreTrainedModel

from pannier.slicer.cut import Cut, cut
from pannier.slicer.export import export
from pannier.slicer.model import SlicedModel
from pannier.slicer.stage import WHOLE, Stage, span_of


def cut_model(model: PreTrainedModel) -> Cut:
    """Traces and cuts a model whose rotary embeddings are frozen; it is left unfit for anything else.

    Raises:
        Unsupported: it can't be cut.
    """
    return cut(export(model))


def join(
    pieces: Cut, model: PreTrainedModel, max_model_len: int, stage: Stage = WHOLE, device: torch.device | None = None
) -> SlicedModel:
    """The slices of one stage with their weights, which they share with `model` unless that is on another device.

    Raises:
        TooManyStages: the model has fewer attention calls than stages.
    """
    own = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    found = {name: tensor.detach() for name, tensor in own} | pieces.constants
    span = span_of(stage, pieces.slices, found)
    needed = {name for piece in pieces.slices[span.start : span.stop] for name in piece.weights}
    needed |= {call.sinks for call in pieces.calls[span.start : span.stop] if call.sinks}
    device = device or model.device
    moved: dict[tuple[int, torch.Size], torch.Tensor] = {}

    def move(tensor: torch.Tensor) -> torch.Tensor:
        tied = (tensor.data_ptr(), tensor.shape)  # stay one tensor
        if tied not in moved:
            moved[tied] = tensor.to(device)
        return moved[tied]

    weights = {name: move(tensor) for name, tensor in found.items() if name in needed}
    return SlicedModel(pieces, weights, dtype=model.dtype, device=device, max_model_len=max_model_len, span=span)
