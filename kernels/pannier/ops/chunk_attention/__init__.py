"""Causal attention inside chunks: the part of a prefill that runs where the rows are."""

from collections.abc import Sequence

from torch import Tensor

from pannier.ops.chunk_attention import batched, cpu
from pannier.ops.gpu import uses_triton


def chunk_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], *, scale: float, window: int, softcap: float
) -> tuple[Tensor, Tensor]:
    """Each row attends to itself and to the rows before it in its chunk: one partial per row.

    q [T, H, Dk], k [T, G, Dk], v [T, G, Dv] of any float dtype and any strides but the last; `lengths` are the rows of
    the chunks, in order, and sum up to T. Row i sees row j <= i of its chunk iff window == 0 or j > i - window. Scores
    are scaled, then capped to softcap * tanh(score / softcap) unless softcap is 0.
    Returns (o [T, H, Dv], l [T, H]), both fp32. Raises ValueError when shapes don't fit.
    """
    _check(q, k, v, lengths)
    if uses_triton(q.device):
        from pannier.ops.chunk_attention import triton

        return triton.chunk_attention(q, k, v, lengths, scale=scale, window=window, softcap=softcap)
    if cpu.takes(q, k, v):
        return cpu.chunk_attention(q, k, v, lengths, scale=scale, window=window, softcap=softcap)
    return batched.chunk_attention(q, k, v, lengths, scale=scale, window=window, softcap=softcap)


def _check(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> None:
    rows, heads, k_size = q.shape
    kv_heads = k.shape[1]
    if heads % kv_heads:
        raise ValueError(f"q has {heads} heads; a multiple of the {kv_heads} KV heads is needed")
    if k.shape != (rows, kv_heads, k_size) or v.shape[:2] != (rows, kv_heads):
        raise ValueError(
            f"k has shape {list(k.shape)} and v {list(v.shape)}; q of shape {list(q.shape)} needs"
            f" {[rows, kv_heads, k_size]} and {[rows, kv_heads, 'any']}"
        )
    if sum(lengths) != rows or min(lengths, default=0) < 0:
        raise ValueError(f"lengths are {list(lengths)}; they must not be negative and sum up to the {rows} rows")


__all__ = ["chunk_attention"]
