"""On a GPU: one program for each tile of query rows and KV head, over the rows before them."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from pannier.ops.chunk_attention.triton_kernels import attend
from pannier.ops.triton_device import Gpu, gpu_of, launching_on, tiling_of


def chunk_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], *, scale: float, window: int, softcap: float
) -> tuple[Tensor, Tensor]:
    """See `pannier.ops.chunk_attention`."""
    return attend_on(gpu_of(q.device), q, k, v, lengths, scale, window, softcap)


def attend_on(
    gpu: Gpu, q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], scale: float, window: int, softcap: float
) -> tuple[Tensor, Tensor]:
    """The same, tiled for this device."""
    q, k, v = (tensor if tensor.stride(2) == 1 else tensor.contiguous() for tensor in (q, k, v))
    rows, heads, k_size = q.shape
    kv_heads, v_size = v.shape[1:]
    heads_per_kv = heads // kv_heads
    tiling = tiling_of(gpu, k_size, v_size, q.dtype, k.dtype, v.dtype)
    tiles = _tiles(tuple(lengths), heads_per_kv, window, tiling.pairs, q.device)
    o = torch.empty(rows, heads, v_size, dtype=torch.float32, device=q.device)
    lse = torch.empty(rows, heads, dtype=torch.float32, device=q.device)
    if not rows:
        return o, lse
    with launching_on(q.device):
        attend[len(tiles), kv_heads](
            q, k, v, tiles, o, lse, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], scale,
            softcap=softcap, window=window, kv_heads=kv_heads, heads_per_kv=heads_per_kv,
            k_size=k_size, v_size=v_size, k_width=tiling.k_width, v_width=tiling.v_width,
            tile_pairs=tiling.pairs, tile_keys=tiling.keys, multiplied=tiling.multiplied, stages=gpu.num_stages,
            num_warps=tiling.warps,
        )  # fmt: skip
    return o, lse


@lru_cache(maxsize=16)
def _tiles(lengths: tuple[int, ...], heads_per_kv: int, window: int, tile_pairs: int, device: torch.device) -> Tensor:
    """int32 [tiles, 4]: first key, the one after the last, first pair, number of pairs; those with most keys first.

    All calls of a step have the same lengths, so that this is made and copied once.
    """
    tiles: list[tuple[int, int, int, int]] = []
    start = 0
    for length in lengths:
        stop_pair = (start + length) * heads_per_kv
        for pair in range(start * heads_per_kv, stop_pair, tile_pairs):
            num_pairs = min(tile_pairs, stop_pair - pair)
            first_key = max(start, pair // heads_per_kv - window + 1) if window else start
            tiles.append((first_key, (pair + num_pairs - 1) // heads_per_kv + 1, pair, num_pairs))
        start += length
    tiles.sort(key=lambda tile: tile[0] - tile[1])
    table = torch.tensor(tiles, dtype=torch.int32, pin_memory=device.type == "cuda")
    return table.to(device, non_blocking=True)
