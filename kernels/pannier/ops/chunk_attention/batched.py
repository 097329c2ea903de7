"""Chunk by chunk with torch's attention kernel, on views of the packed rows."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pannier.ops.dense import attend


def chunk_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], *, scale: float, window: int, softcap: float
) -> tuple[Tensor, Tensor]:
    """See `pannier.ops.chunk_attention`."""
    rows, heads, _ = q.shape
    kv_heads, v_size = v.shape[1:]
    o = torch.empty(rows, heads, v_size, dtype=torch.float32, device=q.device)
    lse = torch.empty(rows, heads, dtype=torch.float32, device=q.device)
    # KV heads are the kernel's batch and the query heads of a KV head its heads: [G, H/G, T, size]. Keys and values of
    # all heads of a KV head are the same memory.
    heads_per_kv = heads // kv_heads
    q = q.unflatten(1, (kv_heads, heads_per_kv)).permute(1, 2, 0, 3)
    k = k.transpose(0, 1).unsqueeze(1).expand(-1, heads_per_kv, -1, -1)
    v = v.transpose(0, 1).unsqueeze(1).expand(-1, heads_per_kv, -1, -1)
    outputs = o.unflatten(1, (kv_heads, heads_per_kv)).permute(1, 2, 0, 3)
    sums = lse.unflatten(1, (kv_heads, heads_per_kv)).permute(1, 2, 0)
    filled = [length for length in lengths if length]
    chunks = (tensor.split(filled, dim=2) for tensor in (q, k, v, outputs, sums))
    for chunk_q, chunk_k, chunk_v, chunk_o, chunk_l in zip(*chunks, strict=True):
        part_o, part_l = _attend_chunk(chunk_q, chunk_k, chunk_v, scale, window, softcap)
        chunk_o.copy_(part_o)
        chunk_l.copy_(part_l)
    return o, lse


def _attend_chunk(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, softcap: float) -> tuple[Tensor, Tensor]:
    rows = q.shape[2]
    if window == 0 or window >= rows:
        return attend(q, k, v, None, scale=scale, softcap=softcap, causal=True)
    return attend(q, k, v, _window_mask(rows, window, q.device), scale=scale, softcap=softcap)


def _window_mask(rows: int, window: int, device: torch.device) -> Tensor:
    """[R, R], 0 where 0 <= row - key < window and -inf elsewhere."""
    hidden = torch.full((rows, rows), float("-inf"), device=device)
    return hidden.triu(1) + hidden.tril(-window)
