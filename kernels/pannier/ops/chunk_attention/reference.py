"""Slow and obvious: row by row, in fp64."""

from collections.abc import Sequence

import torch
from torch import Tensor


def chunk_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], *, scale: float, window: int, softcap: float
) -> tuple[Tensor, Tensor]:
    """See `pannier.ops.chunk_attention`."""
    rows, heads, _ = q.shape
    k = k.double().repeat_interleave(heads // k.shape[1], dim=1)  # [T, H, Dk]
    v = v.double().repeat_interleave(heads // v.shape[1], dim=1)  # [T, H, Dv]
    o = torch.zeros(v.shape, dtype=torch.float64)
    lse = torch.full((rows, heads), float("-inf"), dtype=torch.float64)
    start = 0
    for length in lengths:
        for row in range(start, start + length):
            first = max(start, row - window + 1) if window else start
            scores = torch.einsum("hd,nhd->hn", q[row].double(), k[first : row + 1]) * scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            o[row] = torch.einsum("hn,nhd->hd", torch.softmax(scores, dim=1), v[first : row + 1])
            lse[row] = torch.logsumexp(scores, dim=1)
        start += length
    return o.float(), lse.float()
