"""Attention of query rows over keys and values that lie in blocks."""

from torch import Tensor

from pannier.ops.gpu import gpu_form, uses_triton
from pannier.ops.paged_attention import batched, cpu
from pannier.ops.paged_attention.batch import PagedBatch, PagedSegment, Scratch
from pannier.ops.quantise import check_scales


def paged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    window: int,
    softcap: float,
    scales: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """One partial per query row over its segment's stored keys.

    q [M, H, Dk] of any float dtype, rows in the order of the batch's segments; keys [P, G, K, Dk],
    values [P, G, K, Dv]; those of 8 bits are multiples of `scales`, of keys and of values, each [P, G, K] in fp32. A
    row at position p sees key j < num_keys of its segment iff first_position + j <= p and, with a window,
    first_position + j > p - window. Scores are scaled, then capped to softcap * tanh(score / softcap) unless softcap
    is 0. What the blocks hold beside these keys is never read, be it NaN.
    Returns (o [M, H, Dv], l [M, H]), both fp32; (0, -inf) for a row that sees nothing.

    Raises ValueError when shapes don't fit or a segment has more keys than room in its blocks, IndexError for a block
    number behind the last one.
    """
    _check(q, keys, values, batch)
    check_scales(keys, values, scales)
    if uses_triton(q.device):
        return _attend_on_gpu(q, keys, values, batch, scale, window, softcap, scales)
    attend = cpu.paged_attention if cpu.takes(q, keys, values) else batched.paged_attention
    return attend(q, keys, values, batch, scale=scale, window=window, softcap=softcap, scales=scales)


def _attend_on_gpu(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    batch: PagedBatch,
    scale: float,
    window: int,
    softcap: float,
    scales: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """Imports what only a GPU needs."""
    if gpu_form(q.device).name == "flashinfer":
        from pannier.ops.paged_attention.flashinfer import paged_attention as attend
    else:
        from pannier.ops.paged_attention.triton import paged_attention as attend
    return attend(q, keys, values, batch, scale=scale, window=window, softcap=softcap, scales=scales)


def _check(q: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch) -> None:
    rows, heads, k_size = q.shape
    kv_heads = keys.shape[1]
    if rows != batch.num_rows:
        raise ValueError(f"q has {rows} rows; the segments of the batch have {batch.num_rows}")
    if heads % kv_heads:
        raise ValueError(f"q has {heads} heads; a multiple of the {kv_heads} KV heads is needed")
    if k_size != keys.shape[3]:
        raise ValueError(f"q has heads of size {k_size}; the keys have {keys.shape[3]}")
    if values.shape[:3] != keys.shape[:3]:
        raise ValueError(f"values have shape {list(values.shape)}; {list(keys.shape[:3])} must come first, as in keys")


__all__ = ["PagedBatch", "PagedSegment", "Scratch", "paged_attention"]
