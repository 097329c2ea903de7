"""Chunk by chunk with torch's attention kernel, on views of the packed rows."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pannier.ops.dense import attend


def chunk_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], *, scale: float, window: int, softcap: float
) -> tuple[Tensor, Tensor]:
    """See `pannier.ops.chunk_attention`."""
    rows, heads, k_size = q.shape
    kv_heads = k.shape[1]
    o = torch.empty(rows, kv_heads, heads // kv_heads, v.shape[2], dtype=torch.float32, device=q.device)
    lse = torch.empty(rows, kv_heads, heads // kv_heads, dtype=torch.float32, device=q.device)
    q = q.view(rows, kv_heads, heads // kv_heads, k_size)
    start = 0
    for length in lengths:
        if length:
            chunk = slice(start, start + length)
            part_o, part_l = _attend_chunk(q[chunk], k[chunk], v[chunk], scale, window, softcap)
            o[chunk].permute(1, 2, 0, 3).copy_(part_o)
            lse[chunk].permute(1, 2, 0).copy_(part_l)
        start += length
    return o.view(rows, heads, v.shape[2]), lse.view(rows, heads)


def _attend_chunk(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, softcap: float) -> tuple[Tensor, Tensor]:
    """q [R, G, H/G, Dk], k [R, G, Dk], v [R, G, Dv] to o [G, H/G, R, Dv], l [G, H/G, R].

    KV heads are the kernel's batch and the query heads of one KV head its heads, so keys are shared and not repeated.
    """
    rows, kv_heads, heads_per_kv, k_size = q.shape
    q = q.permute(1, 2, 0, 3)
    k = k.transpose(0, 1).unsqueeze(1).expand(kv_heads, heads_per_kv, rows, k_size)
    v = v.transpose(0, 1).unsqueeze(1).expand(kv_heads, heads_per_kv, rows, v.shape[2])
    if window == 0 or window >= rows:
        return attend(q, k, v, None, scale=scale, softcap=softcap, causal=True)
    return attend(q, k, v, _window_mask(rows, window, q.device), scale=scale, softcap=softcap)


def _window_mask(rows: int, window: int, device: torch.device) -> Tensor:
    """[R, R], 0 where 0 <= row - key < window and -inf elsewhere."""
    hidden = torch.full((rows, rows), float("-inf"), device=device)
    return hidden.triu(1) + hidden.tril(-window)
