"""Triton's attention over blocks agrees with its definition: on a GPU, or interpreted where there is none."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from pannier.ops import PagedBatch, PagedSegment
from pannier.ops import store_kv as store
from pannier.ops.paged_attention import reference
from pannier.ops.quantise import quantise

from . import gpu
from .shapes import (
    Extent,
    Heads,
    Scoring,
    assert_partials_close,
    extents,
    nan_cache,
    random_segments,
    seeds,
    slots_of,
    windows,
)

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True, scope="module")
def _interpreted() -> Iterator[None]:
    with gpu.interpreted():
        yield


class Stored(NamedTuple):
    """A step's rows and a cache, with NaN in every slot that holds no token."""

    q: Tensor
    keys: Tensor
    values: Tensor
    segments: list[PagedSegment]
    scales: tuple[Tensor, Tensor] | None = None


def _stored(
    listed: Sequence[Extent], shape: Heads, block_size: int, seed: int, dtype: torch.dtype = torch.float32
) -> Stored:
    generator = torch.Generator().manual_seed(seed)
    segments, num_blocks = random_segments(listed, block_size, generator)
    keys, values = (cache.to(dtype) for cache in nan_cache(num_blocks, block_size, shape))
    slots = slots_of(segments, block_size)
    _, k, v = shape.qkv(len(slots), generator)
    store(keys, values, slots, k, v.clamp(-1, 1))
    q, _, _ = shape.qkv(sum(extent.num_queries for extent in listed), generator)
    return Stored(q.to(dtype), keys, values, segments)


def _attend(kind: gpu.Gpu, stored: Stored, how: Scoring, least_keys: int) -> tuple[Tensor, Tensor]:
    q, keys, values = (tensor.to(gpu.DEVICE) for tensor in stored[:3])
    scales = stored.scales and (stored.scales[0].to(gpu.DEVICE), stored.scales[1].to(gpu.DEVICE))
    batch = PagedBatch.build(stored.segments, gpu.DEVICE)
    o, lse = gpu.paged_attention.attend_on(kind, q, keys, values, batch, **how, scales=scales, least_keys=least_keys)
    return o.cpu(), lse.cpu()


def _expected(stored: Stored, how: Scoring) -> tuple[Tensor, Tensor]:
    batch = PagedBatch.build(stored.segments, "cpu")
    return reference.paged_attention(stored.q, stored.keys, stored.values, batch, **how, scales=stored.scales)


def _assert_equals_the_reference(stored: Stored, how: Scoring, least_keys: int, tolerance: float) -> None:
    assert_partials_close(_attend(gpu.KIND, stored, how, least_keys), _expected(stored, how), tolerance)


MIXED = [
    Extent(70, 0, 69, 1),  # a decode row
    Extent(50, 0, 50, 9),  # a chunk behind its past
    Extent(0, 0, 0, 2),  # nothing stored
    Extent(17, 64, 70, 3),  # rows inside the keys, which are a later part of the sequence
    Extent(7, 3, 0, 5),  # rows before the first key too
    Extent(1, 0, 0, 1),
]


@pytest.mark.parametrize("dtype", gpu.DTYPES, ids=str)
@pytest.mark.parametrize(
    ("shape", "block_size", "window", "softcap", "least_keys"),
    [
        (Heads(2, 3, 80, 80), 16, 0, 0.0, 16),
        (Heads(1, 1, 64, 64), 32, 5, 0.0, 256),
        (Heads(1, 16, 32, 32), 64, 0, 30.0, 256),
        (Heads(1, 4, 128, 128), 64, 0, 0.0, 32),
        (Heads(2, 2, 96, 33), 16, 20, 2.0, 16),
        (Heads(1, 8, 256, 256), 16, 0, 0.0, 256),
        (Heads(3, 1, 192, 128), 16, 1, 0.0, 16),
        (Heads(1, 20, 1, 5), 16, 0, 0.0, 16),
    ],
    ids=str,
)
def test_awkward_shapes_equal_the_reference(
    shape: Heads, block_size: int, window: int, softcap: float, least_keys: int, dtype: torch.dtype
) -> None:
    """Rows of all kinds in one batch, in blocks full of NaN, ranges whole and split."""
    stored = _stored(MIXED, shape, block_size, 1, dtype)
    how = Scoring(scale=shape.k_size**-0.5, window=window, softcap=softcap)
    _assert_equals_the_reference(stored, how, least_keys, gpu.DTYPES[dtype])


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(extents(), max_size=4), st.sampled_from((1, 16, 64)), windows, st.sampled_from((16, 256)), seeds)
def test_any_lengths_and_tables_equal_the_reference(
    listed: list[Extent], block_size: int, window: int, least_keys: int, seed: int
) -> None:
    """Ragged, empty, windowed, split or not: as the reference, to 1e-5."""
    stored = _stored(listed, Heads(2, 3, 16, 20), block_size, seed)
    _assert_equals_the_reference(stored, Scoring(scale=0.25, window=window, softcap=0.0), least_keys, 1e-5)


@pytest.mark.parametrize(("tensor_cores", "tolerance"), [(False, 1e-5), (True, 3e-3)])
@pytest.mark.parametrize("kept", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("window", [0, 5])
def test_eight_bits_are_multiples_of_their_scales(
    window: int, kept: torch.dtype, tensor_cores: bool, tolerance: float
) -> None:
    """Slots without a token have scales of NaN."""
    stored = _stored(MIXED, Heads(2, 3, 80, 33), 16, 1)
    (keys, key_scales), (values, value_scales) = quantise(stored.keys, kept), quantise(stored.values, kept)
    stored = Stored(stored.q.half(), keys, values, stored.segments, (key_scales, value_scales))
    how = Scoring(scale=0.1, window=window, softcap=0.0)
    kind = gpu.KIND._replace(has_tensor_cores=tensor_cores)
    assert_partials_close(_attend(kind, stored, how, least_keys=32), _expected(stored, how), tolerance)


def test_products_of_halves_stay_within_their_rounding() -> None:
    """As tensor cores multiply them: weights are rounded to fp16 before they meet the values."""
    stored = _stored(MIXED, Heads(2, 3, 80, 33), 16, 1, torch.float16)
    how = Scoring(scale=0.1, window=0, softcap=0.0)
    expected = _expected(stored, how)
    actual = _attend(gpu.KIND._replace(has_tensor_cores=True), stored, how, least_keys=256)
    assert_partials_close(actual, expected, 3e-3)
    assert bool(((actual[0] - expected[0]).abs() > 1e-5).any())


def test_rows_in_views_need_no_copy() -> None:
    """Queries may be slices of one packed projection, also with their elements apart."""
    stored = _stored(MIXED, Heads(2, 2, 16, 16), 16, 1)
    packed = torch.randn(2, len(stored.q), 100, generator=torch.Generator().manual_seed(2))
    how = Scoring(scale=0.25, window=0, softcap=0.0)
    for q in (packed[1, :, 30:94].unflatten(1, (4, 16)), packed[0, :, :64].unflatten(1, (16, 4)).transpose(1, 2)):
        _assert_equals_the_reference(stored._replace(q=q), how, 256, 1e-5)


def test_memory_that_is_not_there_is_never_read() -> None:
    """A kernel looks where the tables say; so they are checked before."""
    stored = _stored([Extent(5, 0, 4, 1)], Heads(1, 1, 16, 16), 16, 1)
    q, keys, values = (tensor.to(gpu.DEVICE) for tensor in stored[:3])
    how = Scoring(scale=1.0, window=0, softcap=0.0)
    batch = PagedBatch.build([PagedSegment([99], 5, 0, 4, 1)], gpu.DEVICE)
    with pytest.raises(IndexError, match="row 0 looks at block 99; the cache has"):
        gpu.paged_attention.paged_attention(q, keys, values, batch, **how)
    batch = PagedBatch.build(stored.segments, gpu.DEVICE)
    with pytest.raises(ValueError, match="must be contiguous"):
        gpu.paged_attention.paged_attention(q, keys.transpose(0, 2), values, batch, **how)
