"""Merging on a GPU: both partials are read once, and one is written."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])  # not a kernel for each kind of number of rows
def merge(
    o1, l1, o2, l2, o, lse, num_rows, num_sinks: tl.constexpr, v_size: tl.constexpr, v_width: tl.constexpr,
    tile_rows: tl.constexpr,
):  # fmt: skip
    """Program (tile of rows) merges o1 [rows, Dv], l1 [rows] with o2, l2 or, if there are sinks, with l2 [sinks]."""
    row = tl.program_id(0).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)
    there = row < num_rows
    dv = tl.arange(0, v_width)
    where = row[:, None] * v_size + dv
    mask = there[:, None] & (dv < v_size)
    one = tl.load(l1 + row, mask=there, other=float("-inf")).to(tl.float32)
    if num_sinks:
        other = tl.load(l2 + row % num_sinks, mask=there, other=float("-inf")).to(tl.float32)
    else:
        other = tl.load(l2 + row, mask=there, other=float("-inf")).to(tl.float32)
    largest = tl.maximum(one, other)
    base = tl.where(largest == float("-inf"), 0.0, largest)
    weight1 = tl.exp(one - base)
    weight2 = tl.exp(other - base)
    total = weight1 + weight2
    divisor = tl.where(total == 0.0, 1.0, total)
    merged = tl.load(o1 + where, mask=mask, other=0.0).to(tl.float32) * (weight1 / divisor)[:, None]
    if not num_sinks:
        merged += tl.load(o2 + where, mask=mask, other=0.0).to(tl.float32) * (weight2 / divisor)[:, None]
    tl.store(o + where, merged, mask=mask)
    tl.store(lse + row, tl.where(total == 0.0, float("-inf"), base + tl.log(divisor)), mask=there)
