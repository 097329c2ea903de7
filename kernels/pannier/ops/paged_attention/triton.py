"""On a GPU: the kernels of `triton_kernels.py`, over tables that the batch makes once per step."""

import torch
from torch import Tensor

from pannier.ops.paged_attention.batch import PagedBatch
from pannier.ops.paged_attention.triton_kernels import attend, merge
from pannier.ops.paged_attention.triton_plan import TritonGeometry, make_triton_plan
from pannier.ops.triton_device import Gpu, as_stored, gpu_of, is_fp8, launching_on, tiling_of

LEAST_KEYS = 256
"""Of a part of a split range."""


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
    """See `pannier.ops.paged_attention`. Raises ValueError also for blocks that aren't contiguous."""
    return attend_on(gpu_of(q.device), q, keys, values, batch, scale, window, softcap, scales)


def attend_on(
    gpu: Gpu,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    batch: PagedBatch,
    scale: float,
    window: int,
    softcap: float,
    scales: tuple[Tensor, Tensor] | None = None,
    least_keys: int = LEAST_KEYS,
) -> tuple[Tensor, Tensor]:
    """The same, tiled for this device."""
    if not keys.is_contiguous() or not values.is_contiguous():
        raise ValueError("keys and values must be contiguous")
    if q.stride(2) != 1:
        q = q.contiguous()
    rows, heads, k_size = q.shape
    num_blocks, kv_heads, block_size, v_size = values.shape
    heads_per_kv = heads // kv_heads
    tiling = tiling_of(gpu, k_size, v_size, q.dtype, keys.dtype, values.dtype)
    few_pairs = min(tiling.pairs, 1 << (heads_per_kv - 1).bit_length())
    geometry = TritonGeometry(
        window, num_blocks, block_size, kv_heads, heads_per_kv, v_size,
        few_pairs, tiling.pairs, tiling.keys, least_keys, gpu.num_programs,
    )  # fmt: skip
    plan = batch.kept(geometry, lambda: make_triton_plan(batch.segments, geometry, batch.device))
    o = torch.empty(rows, heads, v_size, dtype=torch.float32, device=q.device)
    lse = torch.empty(rows, heads, dtype=torch.float32, device=q.device)
    if not plan.covers_all:
        o.zero_()
        lse.fill_(float("-inf"))
    with launching_on(q.device):
        for tile_pairs, table in plan.parts:
            attend[len(table), kv_heads](
                q, as_stored(keys), as_stored(values), *(scales or (None, None)),
                table, plan.blocks, o, lse, plan.partial_o, plan.partial_lse,
                q.stride(0), q.stride(1), scale,
                softcap=softcap, window=window, kv_heads=kv_heads, heads_per_kv=heads_per_kv, block_size=block_size,
                k_size=k_size, v_size=v_size, k_width=tiling.k_width, v_width=tiling.v_width,
                tile_pairs=tile_pairs, tile_keys=tiling.keys, multiplied=tiling.multiplied, stages=gpu.num_stages,
                scaled=scales is not None, is_fp8=is_fp8(keys.dtype), has_fp8=gpu.has_fp8,
                num_warps=tiling.warps if tile_pairs == tiling.pairs else 4,
            )  # fmt: skip
        if len(plan.merges):
            merge[len(plan.merges), kv_heads, plan.merge_pairs](
                plan.merges, plan.partial_o, plan.partial_lse, o, lse,
                kv_heads=kv_heads, heads_per_kv=heads_per_kv, v_size=v_size, v_width=tiling.v_width,
            )  # fmt: skip
    return o, lse
