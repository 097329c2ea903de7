"""The same in few passes: w2 / (w1 + w2) is a sigmoid of l2 - l1, and the merged output lies that far from o1 to o2."""

import torch
from torch import Tensor


def merge_partials(o1: Tensor, l1: Tensor, o2: Tensor, l2: Tensor) -> tuple[Tensor, Tensor]:
    """See `pannier.ops.merge_partials`."""
    o = torch.lerp(o1.float(), o2.float(), _share(l2, l1).unsqueeze(-1))
    return o, torch.logaddexp(l1, l2)


def merge_sinks(o: Tensor, l: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:  # noqa: E741
    """See `pannier.ops.merge_partials`."""
    sinks = sinks.to(l.dtype)
    return o.float() * _share(l, sinks).unsqueeze(-1), torch.logaddexp(l, sinks)


def _share(own: Tensor, other: Tensor) -> Tensor:
    """Weight of a partial beside another one; of two empty ones (-inf less -inf is NaN) either may have all of it."""
    return torch.sigmoid(own - other).nan_to_num_(nan=0.0)
