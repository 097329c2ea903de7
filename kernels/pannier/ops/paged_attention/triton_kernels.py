"""Attention over blocks on a GPU: a program attends for some query rows of one KV head over a range of keys.

The query heads of a KV head go over the keys together. Pair p of a KV head is row p // heads_per_kv and the KV head's
query head p % heads_per_kv, so that a tile of pairs is full whatever their number. Long ranges are split over programs,
so that few long sequences keep a GPU busy; a second kernel merges what they found.
"""

import triton
import triton.language as tl

from pannier.ops.triton_eight_bits import factor_of, widen
from pannier.ops.triton_softmax import LN_2, LOG2_E, add, begin, finish, score

TILE_SPLITS = tl.constexpr(16)  # partials that a merge reads at once


@triton.jit
def attend(
    q, keys, values, key_scales, value_scales, parts, tables, o, lse, partial_o, partial_lse,
    row_stride, head_stride, scale,
    softcap: tl.constexpr, window: tl.constexpr, kv_heads: tl.constexpr, heads_per_kv: tl.constexpr,
    block_size: tl.constexpr, k_size: tl.constexpr, v_size: tl.constexpr, k_width: tl.constexpr, v_width: tl.constexpr,
    tile_pairs: tl.constexpr, tile_keys: tl.constexpr, multiplied: tl.constexpr, stages: tl.constexpr,
    scaled: tl.constexpr, is_fp8: tl.constexpr, has_fp8: tl.constexpr,
):  # fmt: skip
    """Program (part, KV head); a part is 8 numbers as `triton_plan.Part` names them.

    Row r sees key j iff j <= r + shift. What is multiplied has dtype `multiplied`; bf16 goes by way of fp32, which the
    interpreter needs and a compiler drops. Elements of eight bits have a scale for each token and head, [P, G, K].
    """
    part = parts + tl.program_id(0) * 8
    table = tables + tl.load(part)
    start = tl.load(part + 1)
    stop = tl.load(part + 2)
    shift = tl.load(part + 3)
    first_pair = tl.load(part + 4)
    num_pairs = tl.load(part + 5)
    target = tl.load(part + 6)
    kv_head = tl.program_id(1)

    m = tl.arange(0, tile_pairs)
    row = (first_pair + m) // heads_per_kv
    head = kv_head * heads_per_kv + (first_pair + m) % heads_per_kv
    there = m < num_pairs
    dk = tl.arange(0, k_width)
    dv = tl.arange(0, v_width)
    where = row.to(tl.int64) * row_stride + head * head_stride
    rows = tl.load(q + where[:, None] + dk, mask=there[:, None] & (dk < k_size), other=0.0)
    rows = rows.to(tl.float32).to(multiplied)

    last = (row + shift)[:, None]
    acc, largest, total = begin(tile_pairs, v_width)
    for first in tl.range(start, stop, tile_keys, num_stages=stages):
        j = first + tl.arange(0, tile_keys)
        stored = j < stop
        block = tl.load(table + j // block_size, mask=stored, other=0)
        slot = (block.to(tl.int64) * kv_heads + kv_head) * block_size + j % block_size
        k = tl.load(keys + slot[:, None] * k_size + dk, mask=stored[:, None] & (dk < k_size), other=0)
        v = tl.load(values + slot[:, None] * v_size + dv, mask=stored[:, None] & (dv < v_size), other=0)
        k_scale = scale
        v_scale = 1.0
        if scaled:
            k = widen(k, is_fp8, has_fp8)
            v = widen(v, is_fp8, has_fp8)
            k_scale *= factor_of(is_fp8) * tl.load(key_scales + slot, mask=stored, other=0.0)[None, :]
            v_scale = factor_of(is_fp8) * tl.load(value_scales + slot, mask=stored, other=0.0)[None, :]
        seen = stored[None, :] & (j[None, :] <= last)
        if window != 0:
            seen = seen & (j[None, :] > last - window)
        scores = score(rows, k.to(tl.float32).to(multiplied), k_scale, softcap)
        acc, largest, total = add(acc, largest, total, scores, seen, v.to(tl.float32).to(multiplied), v_scale)

    part_o, part_lse = finish(acc, largest, total)
    stored_o = there[:, None] & (dv < v_size)
    if target < 0:
        place = row.to(tl.int64) * (kv_heads * heads_per_kv) + head
        tl.store(o + place[:, None] * v_size + dv, part_o, mask=stored_o)
        tl.store(lse + place, part_lse, mask=there)
    else:
        place = (target + m).to(tl.int64) * kv_heads + kv_head
        tl.store(partial_o + place[:, None] * v_size + dv, part_o, mask=stored_o)
        tl.store(partial_lse + place, part_lse, mask=there)


@triton.jit
def merge(
    merges, partial_o, partial_lse, o, lse,
    kv_heads: tl.constexpr, heads_per_kv: tl.constexpr, v_size: tl.constexpr, v_width: tl.constexpr,
):  # fmt: skip
    """Program (merge, KV head, pair of the merge); a merge is 4 numbers as `triton_plan.Merge` names them."""
    numbers = merges + tl.program_id(0) * 4
    first_pair = tl.load(numbers)
    num_pairs = tl.load(numbers + 1)
    target = tl.load(numbers + 2)
    num_splits = tl.load(numbers + 3)
    kv_head = tl.program_id(1)
    m = tl.program_id(2)
    if m < num_pairs:
        dv = tl.arange(0, v_width)
        acc = tl.zeros((v_width,), dtype=tl.float32)
        largest = float("-inf")
        total = 0.0
        for first in range(0, num_splits, TILE_SPLITS):
            split = first + tl.arange(0, TILE_SPLITS)
            there = split < num_splits
            place = (target + split * num_pairs + m).to(tl.int64) * kv_heads + kv_head
            part_o = tl.load(partial_o + place[:, None] * v_size + dv, mask=there[:, None] & (dv < v_size), other=0.0)
            part_lse = tl.load(partial_lse + place, mask=there, other=float("-inf")) * LOG2_E
            highest = tl.maximum(largest, tl.max(part_lse, axis=0))
            base = tl.where(highest == float("-inf"), 0.0, highest)
            weights = tl.exp2(part_lse - base)
            shrink = tl.exp2(largest - base)
            acc = acc * shrink + tl.sum(weights[:, None] * part_o, axis=0)
            total = total * shrink + tl.sum(weights, axis=0)
            largest = highest
        divisor = tl.where(total == 0.0, 1.0, total)
        pair = first_pair + m
        place = (pair // heads_per_kv).to(tl.int64) * (kv_heads * heads_per_kv)
        place += kv_head * heads_per_kv + pair % heads_per_kv
        tl.store(o + place * v_size + dv, acc / divisor, mask=dv < v_size)
        tl.store(lse + place, tl.where(total == 0.0, float("-inf"), (largest + tl.log2(divisor)) * LN_2))
