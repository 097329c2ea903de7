"""Bucket by bucket: gather the keys and values, then attend densely; the heads of a KV head are rows of one product."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pannier.ops.dense import attend
from pannier.ops.paged_attention.batch import PagedBatch
from pannier.ops.paged_attention.plan import Bucket, Geometry
from pannier.ops.paged_attention.scratch import Scratch
from pannier.ops.quantise import dequantise


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
    kv_heads, block_size = keys.shape[1:3]
    rows, heads, _ = q.shape
    buckets = batch.plan(Geometry(window, block_size, kv_heads, heads // kv_heads))
    if len(buckets) == 1 and buckets[0].rows is None:
        return _attend_bucket(q, keys, values, buckets[0], batch.scratch, scale, softcap, scales)
    o = q.new_zeros(rows, heads, values.shape[3], dtype=torch.float32)
    lse = q.new_full((rows, heads), float("-inf"), dtype=torch.float32)
    _attend_buckets(q, keys, values, buckets, batch.scratch, o, lse, scale=scale, softcap=softcap, scales=scales)
    return o, lse


def _attend_buckets(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    buckets: Sequence[Bucket],
    scratch: Scratch,
    o: Tensor,
    lse: Tensor,
    *,
    scale: float,
    softcap: float,
    scales: tuple[Tensor, Tensor] | None,
) -> None:
    """Write the partials of the buckets' rows into `o` and `lse`."""
    for bucket in buckets:
        if bucket.rows is None:
            part_o, part_l = _attend_bucket(q, keys, values, bucket, scratch, scale, softcap, scales)
            o.copy_(part_o)
            lse.copy_(part_l)
        else:
            part_q = q.index_select(0, bucket.rows)
            part_o, part_l = _attend_bucket(part_q, keys, values, bucket, scratch, scale, softcap, scales)
            o.index_copy_(0, bucket.rows, part_o)
            lse.index_copy_(0, bucket.rows, part_l)


def _attend_bucket(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    bucket: Bucket,
    scratch: Scratch,
    scale: float,
    softcap: float,
    scales: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """q [S * R, H, Dk] to o [S * R, H, Dv], l [S * R, H]."""
    kv_heads = keys.shape[1]
    rows, heads, k_size = q.shape
    v_size = values.shape[3]
    per_segment = (bucket.num_rows, heads // kv_heads)
    unfolded = (bucket.num_segments, bucket.num_rows, kv_heads, heads // kv_heads)
    part_o, part_l = attend(
        _fold(q.view(*unfolded, k_size)),
        _gather_all(keys, scales and scales[0], bucket, scratch, "keys"),
        _gather_all(values, scales and scales[1], bucket, scratch, "values"),
        bucket.mask,
        scale=scale,
        softcap=softcap,
    )
    o = q.new_empty(*unfolded, v_size, dtype=torch.float32)
    lse = q.new_empty(*unfolded, dtype=torch.float32)
    o.transpose(1, 2).copy_(part_o.unflatten(2, per_segment))
    lse.transpose(1, 2).copy_(part_l.unflatten(2, per_segment))
    return o.view(rows, heads, v_size), lse.view(rows, heads)


def _fold(q: Tensor) -> Tensor:
    """[S, R, G, H/G, Dk] to [S, G, R * H/G, Dk]."""
    return q.transpose(1, 2).flatten(2, 3)


def _gather_all(stored: Tensor, scales: Tensor | None, bucket: Bucket, scratch: Scratch, name: str) -> Tensor:
    """[P, G, K, size] to [S, G, L, size], with scales to what was stored, in fp32."""
    if scales is None:
        return _gather(stored, bucket, scratch, name)
    multiples = _gather(stored.view(torch.int8), bucket, scratch, name).view(stored.dtype)  # fp8 can't be indexed
    return dequantise(multiples, _gather(scales.unsqueeze(3), bucket, scratch, f"{name} scales").squeeze(3))


def _gather(stored: Tensor, bucket: Bucket, scratch: Scratch, name: str) -> Tensor:
    """[P, G, K, size] to [S, G, L, size]."""
    blocks, kv_heads, block_size, size = stored.shape
    picked = scratch.take(name, bucket.tiles.shape[0] * block_size, stored)
    torch.index_select(stored.view(blocks * kv_heads, -1), 0, bucket.tiles, out=picked.view(-1, block_size * size))
    if bucket.padding is not None:
        picked.index_fill_(0, bucket.padding, 0)
    return picked.view(bucket.num_segments, kv_heads, -1, size)[:, :, : bucket.num_keys]
