"""Triton's other operators agree with their definitions: on a GPU, or interpreted where there is none."""

import sys
from collections.abc import Iterator
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from pannier import ops
from pannier.ops import PagedBatch, PagedSegment
from pannier.ops.chunk_attention import reference as chunk_reference
from pannier.ops.gpu import GpuForm
from pannier.ops.merge_partials import reference as merge_reference
from pannier.ops.store_kv import reference as store_reference

from . import gpu
from .shapes import FP32, Heads, Scoring, assert_partials_close, nan_cache

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True, scope="module")
def _interpreted() -> Iterator[None]:
    with gpu.interpreted():
        yield


def test_the_public_operators_take_these_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    """A past in blocks and a chunk behind it, merged, are attention over all of it."""
    asked = Mock(return_value=True)
    for name in ("store_kv", "paged_attention", "chunk_attention", "merge_partials"):
        monkeypatch.setattr(sys.modules[f"pannier.ops.{name}"], "uses_triton", asked)
    monkeypatch.setattr(sys.modules["pannier.ops.paged_attention"], "gpu_form", lambda _: GpuForm("triton", "a test"))
    shape, generator = Heads(2, 2, 16, 16), torch.Generator().manual_seed(0)
    q, k, v = shape.qkv(20, generator)
    how = Scoring(scale=0.25, window=0, softcap=0.0)
    o, lse = chunk_reference.chunk_attention(q, k, v, [20], **how)
    expected = merge_reference.merge_sinks(o[12:], lse[12:], q[0, :, 0])

    q, k, v = (tensor.to(gpu.DEVICE) for tensor in (q, k, v))
    keys, values = (cache.to(gpu.DEVICE) for cache in nan_cache(2, 16, shape))
    ops.store_kv(keys, values, torch.arange(16, 28, device=gpu.DEVICE), k[:12], v[:12])
    batch = PagedBatch.build([PagedSegment([1], 12, 0, 12, 8)], gpu.DEVICE)
    past = ops.paged_attention(q[12:], keys, values, batch, **how)
    inside = ops.chunk_attention(q[12:], k[12:], v[12:], [8], **how)
    merged = ops.merge_sinks(*ops.merge_partials(*past, *inside), q[0, :, 0])
    assert_partials_close(_on_cpu(merged), expected, FP32)
    assert asked.call_count == 5


def _on_cpu(partial: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return partial[0].cpu(), partial[1].cpu()


@pytest.mark.parametrize("dtype", gpu.DTYPES, ids=str)
@pytest.mark.parametrize(
    ("lengths", "shape", "window", "softcap"),
    [
        ([1, 0, 33, 7], Heads(2, 3, 80, 33), 0, 0.0),
        ([70], Heads(1, 1, 64, 64), 7, 0.0),
        ([5, 40], Heads(1, 16, 32, 96), 0, 30.0),
        ([66, 1], Heads(1, 4, 128, 128), 40, 2.0),
        ([20], Heads(1, 2, 256, 192), 1, 0.0),
        ([], Heads(1, 2, 32, 32), 0, 0.0),
    ],
    ids=str,
)
def test_chunks_equal_the_reference(
    lengths: list[int], shape: Heads, window: int, softcap: float, dtype: torch.dtype
) -> None:
    """Ragged and empty chunks, windows shorter and longer, grouped heads, unequal sizes."""
    q, k, v = (tensor.to(dtype) for tensor in shape.qkv(sum(lengths), torch.Generator().manual_seed(1)))
    v.clamp_(-1, 1)
    how = Scoring(scale=shape.k_size**-0.5, window=window, softcap=softcap)
    expected = chunk_reference.chunk_attention(q, k, v, lengths, **how)
    q, k, v = (tensor.to(gpu.DEVICE) for tensor in (q, k, v))
    actual = gpu.chunk_attention.chunk_attention(q, k, v, lengths, **how)
    assert_partials_close(_on_cpu(actual), expected, gpu.DTYPES[dtype])


def test_chunks_in_views_of_packed_rows_need_no_copy() -> None:
    """q, k and v may be slices of one packed projection."""
    packed = torch.randn(20, 4 * 16 + 2 * 16 + 2 * 16, generator=torch.Generator().manual_seed(0))
    how = Scoring(scale=0.25, window=6, softcap=0.0)
    q, k, v = (part.unflatten(1, (-1, 16)) for part in packed.split((64, 32, 32), dim=1))
    expected = chunk_reference.chunk_attention(q, k, v, [12, 8], **how)
    q, k, v = (part.unflatten(1, (-1, 16)) for part in packed.to(gpu.DEVICE).split((64, 32, 32), dim=1))
    assert_partials_close(_on_cpu(gpu.chunk_attention.chunk_attention(q, k, v, [12, 8], **how)), expected, FP32)


def _partial(rows: int, shape: Heads, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Log-sum-exps of unlike size; about a third are empty."""
    o = torch.randn(rows, shape.q_heads, shape.v_size, generator=generator)
    lse = torch.randn(rows, shape.q_heads, generator=generator) * 20
    empty = torch.rand(rows, shape.q_heads, generator=generator) < 0.3
    return o.masked_fill(empty[..., None], 0.0), lse.masked_fill(empty, float("-inf"))


@pytest.mark.parametrize("dtype", gpu.DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "shape"), [(0, Heads(1, 2, 8, 8)), (9, Heads(3, 7, 1, 33)), (5, Heads(1, 16, 1, 128))]
)
def test_merged_partials_and_sinks_equal_the_formula(rows: int, shape: Heads, dtype: torch.dtype) -> None:
    """Parts of unlike weight, one or both empty, in the wire's dtype: merged in fp32."""
    generator = torch.Generator().manual_seed(3)
    one, other = _partial(rows, shape, generator), _partial(rows, shape, generator)
    one = one[0].to(dtype), one[1]
    sinks = torch.randn(shape.q_heads, generator=generator) * 10
    merged = gpu.merge_partials.merge_partials(*(tensor.to(gpu.DEVICE) for tensor in (*one, *other)))
    assert_partials_close(_on_cpu(merged), merge_reference.merge_partials(*one, *other), FP32)
    merged = gpu.merge_partials.merge_sinks(*(tensor.to(gpu.DEVICE) for tensor in (*one, sinks)))
    assert_partials_close(_on_cpu(merged), merge_reference.merge_sinks(*one, sinks), FP32)


# The interpreter cuts fp32 to bf16 where a GPU rounds, so that rows of bf16 are what it can store in bf16.
@pytest.mark.parametrize(
    ("dtype", "kept"),
    [
        (torch.float32, torch.float32),
        (torch.float32, torch.float16),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float16),
    ],
    ids=str,
)
@pytest.mark.parametrize(("rows", "block_size"), [(0, 16), (9, 16), (30, 1)])
def test_what_is_stored_equals_the_reference_in_every_slot(
    rows: int, block_size: int, dtype: torch.dtype, kept: torch.dtype
) -> None:
    """Rows are cast to the cache's dtype; slots that weren't named keep what they held."""
    shape, generator = Heads(2, 1, 80, 33), torch.Generator().manual_seed(4)
    num_blocks = -(-rows // block_size) + 2
    slots = torch.randperm(num_blocks * block_size, generator=generator)[:rows]
    k, v = (tensor.to(dtype) for tensor in shape.qkv(rows, generator)[1:])
    theirs = [cache.to(kept) for cache in nan_cache(num_blocks, block_size, shape)]
    ours = [cache.to(gpu.DEVICE, copy=True) for cache in theirs]
    gpu.store_kv.store_kv(ours[0], ours[1], slots.to(gpu.DEVICE), k.to(gpu.DEVICE), v.to(gpu.DEVICE))
    store_reference.store_kv(theirs[0], theirs[1], slots, k, v)
    for actual, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(actual.cpu(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kept", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_eight_bits_are_stored_as_multiples_of_a_scale(kept: torch.dtype) -> None:
    """A scale for each token and head: its largest element is met, ties go to even, one infinity spoils it."""
    shape, generator = Heads(2, 1, 80, 33), torch.Generator().manual_seed(5)
    k, v = (rows * 10 ** torch.randn(rows.shape, generator=generator) for rows in shape.qkv(20, generator)[1:])
    k[3] = 0.0
    k[4, 0, 5], k[5, 1, 0], v[6, 0, 1] = float("inf"), float("nan"), -float("inf")
    k[7, 0] = torch.arange(80) - 0.5  # ties, where the scale is a power of two
    k[7, 0, 0] = 127.0 if kept == torch.int8 else 448.0
    slots = torch.randperm(32, generator=generator)[:20]
    theirs = [torch.zeros(cache.shape, dtype=torch.uint8).view(kept) for cache in nan_cache(2, 16, shape)]
    their_scales = torch.zeros(2, 2, 16), torch.zeros(2, 2, 16)
    ours, our_scales = ([tensor.to(gpu.DEVICE, copy=True) for tensor in both] for both in (theirs, their_scales))
    rows = slots.to(gpu.DEVICE), k.to(gpu.DEVICE), v.to(gpu.DEVICE)
    gpu.store_kv.store_kv(ours[0], ours[1], *rows, (our_scales[0], our_scales[1]))
    store_reference.store_kv(theirs[0], theirs[1], slots, k, v, their_scales)
    for actual, expected in zip(ours, theirs, strict=True):
        assert torch.equal(actual.cpu().view(torch.uint8), expected.view(torch.uint8))
    for actual, expected in zip(our_scales, their_scales, strict=True):
        torch.testing.assert_close(actual.cpu(), expected, rtol=0, atol=0, equal_nan=True)


def test_a_slot_that_is_not_there_writes_no_other_memory() -> None:
    """It is left out, as the host can't know it without waiting."""
    keys, values = (cache.to(gpu.DEVICE) for cache in nan_cache(2, 4, Heads(1, 1, 8, 8)))
    slots = torch.tensor([8, -1, 3], device=gpu.DEVICE)
    rows = torch.ones(3, 1, 8, device=gpu.DEVICE)
    gpu.store_kv.store_kv(keys, values, slots, rows, rows)
    assert keys.isfinite().nonzero()[:, [0, 2]].unique(dim=0).tolist() == [[0, 3]]
