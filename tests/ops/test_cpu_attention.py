"""Every build of the C++ form that this processor runs agrees with the definition of attention over blocks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pannier.ops import PagedBatch, PagedSegment, native, paged_attention
from pannier.ops.paged_attention import cpu, cpu_plan, reference
from pannier.ops.store_kv import reference as store_reference

from .builds import every_build
from .shapes import (
    FP32,
    Extent,
    Heads,
    Scoring,
    assert_partials_close,
    extents,
    nan_cache,
    random_segments,
    seeds,
    slots_of,
    softcaps,
    windows,
)

pytestmark = pytest.mark.timeout(120)
BF16 = 3e-3
"""Where bf16 meets bf16, weights are rounded to 8 bits, each by 2**-9 at most; values are within -1 to 1."""

dtypes = st.sampled_from((torch.float32, torch.bfloat16, torch.float16))
block_sizes = st.sampled_from((1, 4, 16, 24, 64, 128))
sizes = st.sampled_from((1, 5, 16, 33, 64, 80, 96, 128, 256))
heads = st.builds(
    Heads,
    kv_heads=st.sampled_from((1, 2, 3, 10)),
    heads_per_kv=st.sampled_from((1, 2, 3, 4, 5, 7, 16, 20)),
    k_size=sizes,
    v_size=sizes,
)


def _stored(
    listed: list[Extent], shape: Heads, block_size: int, seed: int, q_dtype: torch.dtype, kv_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, list[PagedSegment]]:
    """q, and keys and values with NaN in every slot that holds no token."""
    generator = torch.Generator().manual_seed(seed)
    segments, num_blocks = random_segments(listed, block_size, generator)
    keys, values = (cache.to(kv_dtype) for cache in nan_cache(num_blocks, block_size, shape))
    slots = slots_of(segments, block_size)
    _, k, v = shape.qkv(len(slots), generator)
    store_reference.store_kv(keys, values, slots, k, v.clamp(-1, 1))
    q, _, _ = shape.qkv(sum(extent.num_queries for extent in listed), generator)
    return q.to(q_dtype), keys, values, segments


def _attend(
    name: str, q: Tensor, keys: Tensor, values: Tensor, segments: list[PagedSegment], how: Scoring
) -> tuple[Tensor, Tensor]:
    assert cpu.takes(q, keys, values)
    return cpu.attend_with(native.load(name), q, keys, values, PagedBatch.build(segments, "cpu"), **how)


@pytest.mark.slow
@every_build
@settings(max_examples=150, deadline=None)
@given(st.lists(extents(), max_size=6), heads, block_sizes, windows, softcaps, dtypes, dtypes, seeds)
def test_equals_the_reference(
    name: str,
    listed: list[Extent],
    shape: Heads,
    block_size: int,
    window: int,
    softcap: float,
    q_dtype: torch.dtype,
    kv_dtype: torch.dtype,
    seed: int,
) -> None:
    """Ragged, empty, windowed, capped, grouped, of any dtypes, in blocks full of NaN: as the exact reference."""
    q, keys, values, segments = _stored(listed, shape, block_size, seed, q_dtype, kv_dtype)
    how = Scoring(scale=shape.k_size**-0.5, window=window, softcap=softcap)
    expected = reference.paged_attention(q, keys, values, PagedBatch.build(segments, "cpu"), **how)
    tolerance = BF16 if q_dtype == kv_dtype == torch.bfloat16 else FP32
    assert_partials_close(_attend(name, q, keys, values, segments, how), expected, tolerance)


@every_build
@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 1500), min_size=1, max_size=3), st.integers(2, 5), windows, dtypes, seeds)
def test_long_segments_in_parts_equal_whole_ones(
    name: str, lengths: list[int], threads: int, window: int, dtype: torch.dtype, seed: int
) -> None:
    """Parts for several threads, merged by their log-sum-exps, are what one thread gets in one go."""
    listed = [Extent(length, 0, length - 1, 1 + length % 3) for length in lengths]
    q, keys, values, segments = _stored(listed, Heads(2, 4, 64, 64), 16, seed, dtype, dtype)
    how = Scoring(scale=0.125, window=window, softcap=0.0)
    whole = _attend(name, q, keys, values, segments, how)
    built = native.load(name)._replace(parallel=0)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(cpu_plan, "SHARED_BYTES", 0)
        patched.setattr(torch, "get_num_threads", lambda: threads)
        parts = cpu.attend_with(built, q, keys, values, PagedBatch.build(segments, "cpu"), **how)
    assert_partials_close(parts, whole, BF16 if dtype == torch.bfloat16 else FP32)


@every_build
def test_threads_get_what_one_thread_gets(name: str) -> None:
    """To the last bit, over and over: no task is lost, done twice or mixed up with another."""
    listed = [Extent(100 + n, 0, 99 + n, 1) for n in range(40)]
    q, keys, values, segments = _stored(listed, Heads(3, 3, 64, 64), 64, 0, torch.bfloat16, torch.bfloat16)
    how = Scoring(scale=0.125, window=0, softcap=0.0)
    alone = _attend(name, q, keys, values, segments, how)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for _ in range(10):
            shared = _attend(name, q, keys, values, segments, how)
            assert torch.equal(shared[0], alone[0])
            assert torch.equal(shared[1], alone[1])
    finally:
        torch.set_num_threads(threads)


@every_build
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads_per_kv", [1, 3])
def test_chunks_of_many_rows_beside_decode_rows(name: str, dtype: torch.dtype, heads_per_kv: int) -> None:
    """Blocks of queries that are full, that are not, and rows that are too few for one: each row in its place."""
    listed = [Extent(50, 0, 49, 1), Extent(130, 0, 130, 300), Extent(70, 0, 70, 3), Extent(90, 0, 40, 90)]
    q, keys, values, segments = _stored(listed, Heads(2, heads_per_kv, 80, 33), 16, 1, dtype, dtype)
    for window in (0, 50):
        how = Scoring(scale=0.1, window=window, softcap=0.0)
        expected = reference.paged_attention(q, keys, values, PagedBatch.build(segments, "cpu"), **how)
        tolerance = BF16 if dtype == torch.bfloat16 else FP32
        assert_partials_close(_attend(name, q, keys, values, segments, how), expected, tolerance)


@every_build
def test_rows_at_odd_addresses_are_read(name: str) -> None:
    """A received frame begins anywhere."""
    q, keys, values, segments = _stored(
        [Extent(40, 0, 39, 1)], Heads(2, 4, 64, 64), 16, 2, torch.bfloat16, torch.bfloat16
    )
    frame = bytearray(1) + bytearray(q.view(torch.uint8).flatten().tolist())
    moved = torch.frombuffer(frame, dtype=torch.bfloat16, offset=1).view(q.shape)
    assert moved.data_ptr() % 2 == 1
    how = Scoring(scale=0.125, window=0, softcap=0.0)
    there, here = (_attend(name, tensor, keys, values, segments, how) for tensor in (moved, q))
    assert torch.equal(there[0], here[0])


@every_build
def test_scores_of_hundreds_neither_overflow_nor_lose_the_largest(name: str) -> None:
    """The largest may come first, last or amid others, in a tile of its own or not."""
    for largest in (0, 63, 64, 130, 199):
        q, keys, values, segments = _stored(
            [Extent(200, 0, 199, 1)], Heads(1, 3, 64, 64), 16, largest, torch.float32, torch.float32
        )
        keys[segments[0].blocks[largest // 16], :, largest % 16] = q[0, 1] * 2
        how = Scoring(scale=8.0, window=0, softcap=0.0)
        expected = reference.paged_attention(q, keys, values, PagedBatch.build(segments, "cpu"), **how)
        assert_partials_close(_attend(name, q, keys, values, segments, how), expected, 1e-4)


def test_a_cache_of_two_dtypes_takes_the_batched_form() -> None:
    """What the C++ form doesn't read isn't refused."""
    q, keys, values, segments = _stored(
        [Extent(40, 0, 39, 1)], Heads(2, 4, 16, 16), 16, 2, torch.float32, torch.float32
    )
    assert not cpu.takes(q, keys, values.double())
    how = Scoring(scale=0.25, window=0, softcap=0.0)
    batch = PagedBatch.build(segments, "cpu")
    expected = reference.paged_attention(q, keys, values, batch, **how)
    assert_partials_close(paged_attention(q, keys, values.double(), batch, **how), expected, FP32)
