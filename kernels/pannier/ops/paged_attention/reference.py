"""Slow and obvious: row by row, in fp64."""

import torch
from torch import Tensor

from pannier.ops.paged_attention.batch import PagedBatch
from pannier.ops.paged_attention.segment import PagedSegment


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
    """See `pannier.ops.paged_attention`."""
    rows, heads, _ = q.shape
    o = torch.zeros(rows, heads, values.shape[3], dtype=torch.float64)
    lse = torch.full((rows, heads), float("-inf"), dtype=torch.float64)
    key_scales, value_scales = scales or (None, None)
    row = 0
    for segment in batch.segments:
        k = _stored(keys, key_scales, segment).repeat_interleave(heads // keys.shape[1], dim=1)  # [N, H, Dk]
        v = _stored(values, value_scales, segment).repeat_interleave(heads // keys.shape[1], dim=1)  # [N, H, Dv]
        for position in range(segment.query_position, segment.query_position + segment.num_queries):
            seen = [j for j in range(segment.num_keys) if _sees(segment, position, j, window)]
            if seen:
                scores = torch.einsum("hd,nhd->hn", q[row].double(), k[seen]) * scale
                if softcap:
                    scores = softcap * torch.tanh(scores / softcap)
                o[row] = torch.einsum("hn,nhd->hd", torch.softmax(scores, dim=1), v[seen])
                lse[row] = torch.logsumexp(scores, dim=1)
            row += 1
    return o.float(), lse.float()


def _sees(segment: PagedSegment, position: int, j: int, window: int) -> bool:
    key_position = segment.first_position + j
    return key_position <= position and (window == 0 or key_position > position - window)


def _stored(cache: Tensor, scales: Tensor | None, segment: PagedSegment) -> Tensor:
    """The segment's tokens in order, fp64 [N, G, size]."""
    _, kv_heads, block_size, size = cache.shape
    tokens = torch.zeros(segment.num_keys, kv_heads, size, dtype=torch.float64)
    for j in range(segment.num_keys):
        block, offset = segment.blocks[j // block_size], j % block_size
        tokens[j] = cache[block, :, offset].double()
        if scales is not None:
            tokens[j] *= scales[block, :, offset].double().unsqueeze(-1)
    return tokens
