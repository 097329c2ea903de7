"""From a model in memory to slices that run: freeze, trace, cut, and join with the weights."""

from transformers import PreTrainedModel

from pannier.slicer.cut import Cut, cut
from pannier.slicer.export import export
from pannier.slicer.model import SlicedModel


def cut_model(model: PreTrainedModel) -> Cut:
    """Traces and cuts a model whose rotary embeddings are frozen; it is left unfit for anything else.

    Raises:
        Unsupported: it can't be cut.
    """
    return cut(export(model))


def join(pieces: Cut, model: PreTrainedModel, max_model_len: int) -> SlicedModel:
    """The slices with the weights of `model`, which they share."""
    own = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    needed = {name for piece in pieces.slices for name in piece.weights}
    needed |= {call.sinks for call in pieces.calls if call.sinks}
    weights = {name: tensor.detach() for name, tensor in own if name in needed}
    weights |= {name: tensor.to(model.device) for name, tensor in pieces.constants.items()}
    return SlicedModel(pieces, weights, dtype=model.dtype, device=model.device, max_model_len=max_model_len)
