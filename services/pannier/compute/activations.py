"""What travels from one stage of a model to the next: the values that are alive where its slices are divided."""

from collections.abc import Sequence

import torch

from pannier.slicer.model import Values
from pannier.wire import WireError
from pannier.wire import messages as m


def activations(step: m.Step, names: Sequence[str], values: Values) -> tuple[m.Activations, list[torch.Tensor]]:
    """The message with these of the values, and its tensors."""
    chosen = [values[name] for name in names]
    sizes = tuple(None if isinstance(value, torch.Tensor) else int(value) for value in chosen)
    tensors = [value for value in chosen if isinstance(value, torch.Tensor)]
    return m.Activations(step.life, step.session, step.step, step.lane, sizes, ()), tensors


def values_of(
    message: m.Activations, tensors: Sequence[torch.Tensor], names: Sequence[str], device: torch.device
) -> Values:
    """The values by their names, in memory of their own on `device`. Raises `WireError` if they are not as many."""
    if len(message.sizes) != len(names) or message.sizes.count(None) != len(tensors):
        raise WireError(f"{len(message.sizes)} values with {len(tensors)} tensors came, where {list(names)} are needed")
    left = iter(tensors)
    # A frame lies wherever it was received, which some operators read slowly or not at all: so each is copied once.
    return {
        name: next(left).to(device, copy=True) if size is None else size
        for name, size in zip(names, message.sizes, strict=True)
    }
