"""Merge partial attention results over disjoint keys, and sinks into them."""

from torch import Tensor

from pannier.ops.gpu import uses_triton
from pannier.ops.merge_partials import fused


def merge_partials(o1: Tensor, l1: Tensor, o2: Tensor, l2: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the keys of both partials; two empty ones give an empty one.

    o1, o2 [..., Dv] of any float dtype, l1, l2 [...] fp32; returns (o fp32, l fp32) of the same shapes.
    """
    if uses_triton(o1.device):
        from pannier.ops.merge_partials import triton

        return triton.merge_partials(o1, l1, o2, l2)
    return fused.merge_partials(o1, l1, o2, l2)


def merge_sinks(o: Tensor, l: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:  # noqa: E741
    """Merge the partial (0, sink) of each head: it takes weight and gives nothing. To be done once per row.

    o [M, H, Dv] of any float dtype, l [M, H] fp32, sinks [H] of any float dtype; returns (o fp32, l fp32).
    """
    if uses_triton(o.device):
        from pannier.ops.merge_partials import triton

        return triton.merge_sinks(o, l, sinks)
    return fused.merge_sinks(o, l, sinks)


__all__ = ["merge_partials", "merge_sinks"]
