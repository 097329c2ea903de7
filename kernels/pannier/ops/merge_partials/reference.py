"""The formula as it is written down, in fp64."""

import torch
from torch import Tensor


def merge_partials(o1: Tensor, l1: Tensor, o2: Tensor, l2: Tensor) -> tuple[Tensor, Tensor]:
    """See `pannier.ops.merge_partials`."""
    o1, l1, o2, l2 = (tensor.double() for tensor in (o1, l1, o2, l2))
    largest = torch.maximum(l1, l2)
    w1 = torch.exp(l1 - largest)
    w2 = torch.exp(l2 - largest)
    o = (w1[..., None] * o1 + w2[..., None] * o2) / (w1 + w2)[..., None]
    lse = largest + torch.log(w1 + w2)
    empty = torch.isneginf(largest)
    o = torch.where(empty[..., None], torch.zeros_like(o), o)
    lse = torch.where(empty, largest, lse)
    return o.float(), lse.float()


def merge_sinks(o: Tensor, l: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:  # noqa: E741
    """See `pannier.ops.merge_partials`."""
    return merge_partials(o, l, torch.zeros_like(o), sinks.expand_as(l))
