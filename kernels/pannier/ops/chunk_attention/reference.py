"""Slow and obvious: row by row, head by head, in fp64."""

from collections.abc import Sequence

import torch
from torch import Tensor


def chunk_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], *, scale: float, window: int, softcap: float
) -> tuple[Tensor, Tensor]:
    """See `pannier.ops.chunk_attention`."""
    rows, heads, _ = q.shape
    heads_per_kv = heads // k.shape[1]
    o = torch.zeros(rows, heads, v.shape[2], dtype=torch.float64)
    lse = torch.full((rows, heads), float("-inf"), dtype=torch.float64)
    start = 0
    for length in lengths:
        for row in range(length):
            first = max(0, row - window + 1) if window else 0
            seen = slice(start + first, start + row + 1)
            for head in range(heads):
                kv_head = head // heads_per_kv
                scores = k[seen, kv_head].double() @ q[start + row, head].double() * scale
                if softcap:
                    scores = softcap * torch.tanh(scores / softcap)
                o[start + row, head] = torch.softmax(scores, dim=0) @ v[seen, kv_head].double()
                lse[start + row, head] = torch.logsumexp(scores, dim=0)
        start += length
    return o.float(), lse.float()
