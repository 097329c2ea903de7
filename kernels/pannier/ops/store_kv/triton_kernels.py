"""Storing on a GPU: a program for each row and KV head."""

import triton
import triton.language as tl


@triton.jit
def store(
    keys, values, slots, k, v, k_row, k_head, v_row, v_head, num_slots,
    kv_heads: tl.constexpr, block_size: tl.constexpr,
    k_size: tl.constexpr, v_size: tl.constexpr, k_width: tl.constexpr, v_width: tl.constexpr,
):  # fmt: skip
    """Program (row, KV head). A slot that the cache hasn't got is left out."""
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    slot = tl.load(slots + row)
    if (slot >= 0) & (slot < num_slots):
        place = (slot // block_size * kv_heads + kv_head) * block_size + slot % block_size
        dk = tl.arange(0, k_width)
        key = tl.load(k + row * k_row + kv_head * k_head + dk, mask=dk < k_size)
        tl.store(keys + place * k_size + dk, key.to(tl.float32).to(keys.dtype.element_ty), mask=dk < k_size)
        dv = tl.arange(0, v_width)
        value = tl.load(v + row * v_row + kv_head * v_head + dv, mask=dv < v_size)
        tl.store(values + place * v_size + dv, value.to(tl.float32).to(values.dtype.element_ty), mask=dv < v_size)
