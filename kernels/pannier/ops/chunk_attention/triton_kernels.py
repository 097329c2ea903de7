"""Causal attention inside chunks on a GPU: a program attends for some query rows of one KV head."""

import triton
import triton.language as tl

from pannier.ops.triton_softmax import add, begin, finish, score


@triton.jit
def attend(
    q, k, v, tiles, o, lse, q_row, q_head, k_row, k_head, v_row, v_head, scale,
    softcap: tl.constexpr, window: tl.constexpr, kv_heads: tl.constexpr, heads_per_kv: tl.constexpr,
    k_size: tl.constexpr, v_size: tl.constexpr, k_width: tl.constexpr, v_width: tl.constexpr,
    tile_pairs: tl.constexpr, tile_keys: tl.constexpr, multiplied: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    """Program (tile, KV head); a tile is the 4 numbers that `_tiles` makes.

    Pairs of a row and a query head are as in `pannier.ops.paged_attention.triton_kernels`.
    """
    numbers = tiles + tl.program_id(0) * 4
    start = tl.load(numbers)
    stop = tl.load(numbers + 1)
    first_pair = tl.load(numbers + 2)
    num_pairs = tl.load(numbers + 3)
    kv_head = tl.program_id(1)

    m = tl.arange(0, tile_pairs)
    row = (first_pair + m) // heads_per_kv
    head = kv_head * heads_per_kv + (first_pair + m) % heads_per_kv
    there = m < num_pairs
    dk = tl.arange(0, k_width)
    dv = tl.arange(0, v_width)
    where = row.to(tl.int64) * q_row + head * q_head
    rows = tl.load(q + where[:, None] + dk, mask=there[:, None] & (dk < k_size), other=0.0)
    rows = rows.to(tl.float32).to(multiplied)

    k += kv_head * k_head
    v += kv_head * v_head
    acc, largest, total = begin(tile_pairs, v_width)
    for first in tl.range(start, stop, tile_keys, num_stages=stages):
        j = first + tl.arange(0, tile_keys)
        place = j.to(tl.int64)[:, None]
        keys = tl.load(k + place * k_row + dk, mask=(j < stop)[:, None] & (dk < k_size), other=0.0)
        values = tl.load(v + place * v_row + dv, mask=(j < stop)[:, None] & (dv < v_size), other=0.0)
        seen = j[None, :] <= row[:, None]
        if window != 0:
            seen = seen & (j[None, :] > row[:, None] - window)
        scores = score(rows, keys.to(tl.float32).to(multiplied), scale, softcap)
        acc, largest, total = add(acc, largest, total, scores, seen, values.to(tl.float32).to(multiplied), 1.0)

    part_o, part_lse = finish(acc, largest, total)
    place = row.to(tl.int64) * (kv_heads * heads_per_kv) + head
    tl.store(o + place[:, None] * v_size + dv, part_o, mask=there[:, None] & (dv < v_size))
    tl.store(lse + place, part_lse, mask=there)
