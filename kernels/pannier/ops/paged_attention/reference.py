"""Slow and obvious: row by row, head by head, key by key, in fp64."""

import torch
from torch import Tensor

from pannier.ops.paged_attention.batch import PagedBatch
from pannier.ops.paged_attention.segment import PagedSegment


def paged_attention(
    q: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, *, scale: float, window: int, softcap: float
) -> tuple[Tensor, Tensor]:
    """See `pannier.ops.paged_attention`."""
    rows, heads, _ = q.shape
    heads_per_kv = heads // keys.shape[1]
    o = torch.zeros(rows, heads, values.shape[3], dtype=torch.float64)
    lse = torch.full((rows, heads), float("-inf"), dtype=torch.float64)
    row = 0
    for segment in batch.segments:
        for position in range(segment.query_position, segment.query_position + segment.num_queries):
            seen = [j for j in range(segment.num_keys) if _sees(segment, position, j, window)]
            for head in range(heads if seen else 0):
                kv_head = head // heads_per_kv
                scores = _stored(keys, segment, kv_head, seen) @ q[row, head].double() * scale
                if softcap:
                    scores = softcap * torch.tanh(scores / softcap)
                o[row, head] = torch.softmax(scores, dim=0) @ _stored(values, segment, kv_head, seen)
                lse[row, head] = torch.logsumexp(scores, dim=0)
            row += 1
    return o.float(), lse.float()


def _sees(segment: PagedSegment, position: int, j: int, window: int) -> bool:
    key_position = segment.first_position + j
    return key_position <= position and (window == 0 or key_position > position - window)


def _stored(stored: Tensor, segment: PagedSegment, kv_head: int, tokens: list[int]) -> Tensor:
    """The rows of these tokens, fp64 [N, size]."""
    block_size = stored.shape[2]
    return torch.stack([stored[segment.blocks[j // block_size], kv_head, j % block_size] for j in tokens]).double()
