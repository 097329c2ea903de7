"""On a GPU: both partials are read once, and one is written."""

import torch
from torch import Tensor

from pannier.ops.merge_partials.triton_kernels import merge
from pannier.ops.triton_device import launching_on, width_of

ROWS = 16
"""Of a program."""


def merge_partials(o1: Tensor, l1: Tensor, o2: Tensor, l2: Tensor) -> tuple[Tensor, Tensor]:
    """See `pannier.ops.merge_partials`."""
    return _merge(o1, l1, o2.contiguous(), l2.contiguous(), num_sinks=0)


def merge_sinks(o: Tensor, l: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:  # noqa: E741
    """See `pannier.ops.merge_partials`."""
    return _merge(o, l, o, sinks.contiguous(), num_sinks=len(sinks))


def _merge(o1: Tensor, l1: Tensor, o2: Tensor, l2: Tensor, num_sinks: int) -> tuple[Tensor, Tensor]:
    o1, l1 = o1.contiguous(), l1.contiguous()
    o = torch.empty(o1.shape, dtype=torch.float32, device=o1.device)
    lse = torch.empty(l1.shape, dtype=torch.float32, device=o1.device)
    if l1.numel():
        v_size = o1.shape[-1]
        with launching_on(o1.device):
            merge[-(-l1.numel() // ROWS),](
                o1, l1, o2, l2, o, lse, l1.numel(),
                num_sinks=num_sinks, v_size=v_size, v_width=width_of(v_size), tile_rows=ROWS,
            )  # fmt: skip
    return o, lse
