"""Attention over blocks agrees with its definition, whatever the shapes and whatever else the blocks hold."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pannier.ops import PagedBatch, PagedSegment, chunk_attention, paged_attention, store_kv
from pannier.ops.paged_attention import reference

from .shapes import (
    BF16,
    FP32,
    Extent,
    Heads,
    Scoring,
    assert_partials_close,
    extents,
    heads,
    nan_cache,
    random_segments,
    seeds,
    slots_of,
    softcaps,
    windows,
)

pytestmark = pytest.mark.timeout(60)
block_sizes = st.sampled_from((1, 4, 16, 64))


def _stored(
    listed: Sequence[Extent], shape: Heads, block_size: int, seed: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, PagedBatch]:
    """q, and keys and values with NaN in every slot that holds no token."""
    generator = torch.Generator().manual_seed(seed)
    segments, num_blocks = random_segments(listed, block_size, generator)
    keys, values = (cache.to(dtype) for cache in nan_cache(num_blocks, block_size, shape))
    slots = slots_of(segments, block_size)
    _, k, v = shape.qkv(len(slots), generator)
    store_kv(keys, values, slots, k, v)
    q, _, _ = shape.qkv(sum(extent.num_queries for extent in listed), generator)
    return q.to(dtype), keys, values, PagedBatch.build(segments, "cpu")


@settings(max_examples=150, deadline=None)
@given(st.lists(extents(), max_size=6), heads, block_sizes, windows, softcaps, seeds)
def test_fp32_equals_the_reference(
    listed: list[Extent], shape: Heads, block_size: int, window: int, softcap: float, seed: int
) -> None:
    """Ragged, empty, windowed, capped, grouped, in blocks full of NaN: as the reference, to 1e-5."""
    q, keys, values, batch = _stored(listed, shape, block_size, seed, torch.float32)
    how = Scoring(scale=shape.k_size**-0.5, window=window, softcap=softcap)
    expected = reference.paged_attention(q, keys, values, batch, **how)
    assert_partials_close(paged_attention(q, keys, values, batch, **how), expected, FP32)


@settings(max_examples=60, deadline=None)
@given(st.lists(extents(), max_size=6), heads, block_sizes, windows, softcaps, seeds)
def test_bf16_equals_the_reference_on_the_same_inputs(
    listed: list[Extent], shape: Heads, block_size: int, window: int, softcap: float, seed: int
) -> None:
    """With bf16 rows and cache the reference, exact on these inputs, differs by the rounding of bf16 at most."""
    q, keys, values, batch = _stored(listed, shape, block_size, seed, torch.bfloat16)
    values.clamp_(-1, 1)  # NaN stays NaN
    how = Scoring(scale=shape.k_size**-0.5, window=window, softcap=softcap)
    expected = reference.paged_attention(q, keys, values, batch, **how)
    assert_partials_close(paged_attention(q, keys, values, batch, **how), expected, BF16)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 70), min_size=1, max_size=4), heads, block_sizes, windows, softcaps, seeds)
def test_blocks_in_any_order_equal_contiguous_keys(
    lengths: list[int], shape: Heads, block_size: int, window: int, softcap: float, seed: int
) -> None:
    """Sequences stored in shuffled blocks and read row by row: the same as attention over the packed rows."""
    generator = torch.Generator().manual_seed(seed)
    listed = [Extent(length, 0, 0, length) for length in lengths]
    segments, num_blocks = random_segments(listed, block_size, generator)
    keys, values = nan_cache(num_blocks, block_size, shape)
    q, k, v = shape.qkv(sum(lengths), generator)
    store_kv(keys, values, slots_of(segments, block_size), k, v)
    how = Scoring(scale=shape.k_size**-0.5, window=window, softcap=softcap)
    paged = paged_attention(q, keys, values, PagedBatch.build(segments, "cpu"), **how)
    assert_partials_close(paged, chunk_attention(q, k, v, lengths, **how), FP32)


def test_one_batch_serves_calls_of_unlike_heads_and_windows() -> None:
    """What a batch keeps for one call isn't taken for another one."""
    listed = [Extent(50, 0, 49, 1), Extent(30, 0, 30, 9), Extent(7, 3, 9, 1)]
    segments, _ = random_segments(listed, 16, torch.Generator().manual_seed(1))
    batch = PagedBatch.build(segments, "cpu")
    for shape in (Heads(1, 4, 16, 16), Heads(2, 2, 16, 16), Heads(2, 4, 32, 16)):
        q, keys, values, _ = _stored(listed, shape, 16, 1, torch.float32)
        for window in (0, 8, 0, 20):
            how = Scoring(scale=0.3, window=window, softcap=0.0)
            expected = reference.paged_attention(q, keys, values, batch, **how)
            assert_partials_close(paged_attention(q, keys, values, batch, **how), expected, FP32)


def test_many_sequences_of_unlike_length_take_several_buckets() -> None:
    """Rows come back in their own order however the segments were grouped."""
    listed = [Extent(1 + 37 * n % 300, 0, 37 * n % 300, 1) for n in range(40)]
    q, keys, values, batch = _stored(listed, Heads(2, 3, 16, 16), 16, 5, torch.float32)
    expected = reference.paged_attention(q, keys, values, batch, scale=0.25, window=0, softcap=0.0)
    actual = paged_attention(q, keys, values, batch, scale=0.25, window=0, softcap=0.0)
    assert_partials_close(actual, expected, FP32)


def test_queries_may_be_a_slice_of_packed_rows() -> None:
    """q needs no copy when it lies beside k and v."""
    q, keys, values, batch = _stored([Extent(9, 0, 8, 1), Extent(30, 0, 30, 2)], Heads(2, 2, 8, 8), 4, 2, torch.float32)
    packed = torch.cat([q, torch.full_like(q, torch.nan)], dim=2)
    how = Scoring(scale=0.3, window=0, softcap=0.0)
    expected = reference.paged_attention(q, keys, values, batch, **how)
    assert_partials_close(paged_attention(packed[:, :, :8], keys, values, batch, **how), expected, FP32)


def test_large_scores_neither_overflow_nor_lose_the_largest() -> None:
    """Scores of hundreds are fine in the log-sum-exp and in the weights."""
    q, keys, values, batch = _stored([Extent(50, 0, 49, 1)], Heads(1, 3, 64, 64), 16, 3, torch.float32)
    expected = reference.paged_attention(q, keys, values, batch, scale=40.0, window=0, softcap=0.0)
    actual = paged_attention(q, keys, values, batch, scale=40.0, window=0, softcap=0.0)
    assert_partials_close(actual, expected, FP32)


@pytest.mark.parametrize(
    ("segment", "message"),
    [
        (PagedSegment([0], 5, 0, 4, 1), "num_keys of segment 0 is 5; its 1 blocks hold 4"),
        (PagedSegment([0, -1], 5, 0, 4, 1), "segment 0 names block -1"),
        (PagedSegment([0], -1, 0, 4, 1), "none of its numbers may be negative"),
    ],
)
def test_segments_that_can_not_be_are_refused(segment: PagedSegment, message: str) -> None:
    """One sentence names segment, field and value."""
    keys = torch.zeros(2, 1, 4, 8)
    with pytest.raises(ValueError, match=message):
        paged_attention(
            torch.zeros(1, 1, 8), keys, keys, PagedBatch.build([segment], "cpu"), scale=1.0, window=0, softcap=0.0
        )


def test_a_block_behind_the_last_one_is_refused() -> None:
    """A block number that the cache hasn't got never reads other memory."""
    keys = torch.zeros(2, 1, 4, 8)
    batch = PagedBatch.build([PagedSegment([2], 3, 0, 2, 1)], "cpu")
    with pytest.raises(IndexError):
        paged_attention(torch.zeros(1, 1, 8), keys, keys, batch, scale=1.0, window=0, softcap=0.0)


@pytest.mark.parametrize(
    ("q", "message"),
    [
        (torch.zeros(2, 2, 8), "q has 2 rows; the segments of the batch have 1"),
        (torch.zeros(1, 3, 8), "q has 3 heads; a multiple of the 2 KV heads"),
        (torch.zeros(1, 2, 4), "q has heads of size 4; the keys have 8"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(q: Tensor, message: str) -> None:
    """One sentence names what was given and what fits."""
    keys = torch.zeros(2, 2, 4, 8)
    batch = PagedBatch.build([PagedSegment([1], 3, 0, 2, 1)], "cpu")
    with pytest.raises(ValueError, match=message):
        paged_attention(q, keys, keys, batch, scale=1.0, window=0, softcap=0.0)
