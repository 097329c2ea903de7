"""Storing on a GPU: a program for each row and KV head."""

import triton
import triton.language as tl

from pannier.ops.triton_eight_bits import quantise


@triton.jit(do_not_specialize=["num_slots"])  # not a kernel for each kind of number of blocks
def store(
    keys, values, key_scales, value_scales, slots, k, v, k_row, k_head, v_row, v_head, num_slots,
    kv_heads: tl.constexpr, block_size: tl.constexpr,
    k_size: tl.constexpr, v_size: tl.constexpr, k_width: tl.constexpr, v_width: tl.constexpr,
    scaled: tl.constexpr, is_fp8: tl.constexpr,
):  # fmt: skip
    """Program (row, KV head). A slot that the cache hasn't got is left out."""
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    slot = tl.load(slots + row)
    if (slot >= 0) & (slot < num_slots):
        place = (slot // block_size * kv_heads + kv_head) * block_size + slot % block_size
        k += row * k_row + kv_head * k_head
        v += row * v_row + kv_head * v_head
        _store_row(keys, key_scales, place, k, k_size, k_width, scaled, is_fp8)
        _store_row(values, value_scales, place, v, v_size, v_width, scaled, is_fp8)


@triton.jit
def _store_row(
    stored, scales, place, row, size: tl.constexpr, width: tl.constexpr, scaled: tl.constexpr, is_fp8: tl.constexpr
):  # fmt: skip
    d = tl.arange(0, width)
    elements = tl.load(row + d, mask=d < size, other=0.0).to(tl.float32)
    if scaled:
        multiples, scale = quantise(elements, is_fp8)
        tl.store(stored + place * size + d, multiples, mask=d < size)
        tl.store(scales + place, scale)
    else:
        tl.store(stored + place * size + d, elements.to(stored.dtype.element_ty), mask=d < size)
