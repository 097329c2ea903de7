"""Keys and values in 8 bits are what `quantise` says, and attention over them is attention over just that."""

from math import inf, nan

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pannier.ops import PagedBatch, PagedSegment, native, paged_attention, store_kv
from pannier.ops.paged_attention import batched, cpu, reference
from pannier.ops.quantise import dequantise, quantise
from pannier.ops.store_kv import cpu as store_cpu
from pannier.ops.store_kv import reference as store_reference

from .builds import every_build
from .shapes import (
    FP32,
    Extent,
    Heads,
    Scoring,
    assert_partials_close,
    extents,
    random_segments,
    seeds,
    slots_of,
    softcaps,
    spoilt_cache,
    windows,
)

pytestmark = pytest.mark.timeout(120)
INT8, FP8 = torch.int8, torch.float8_e4m3fn
BF16 = 3e-3
"""Where weights are rounded to bf16, as in the other tests."""
INTEGERS = 5e-4
"""Where int8 is multiplied in whole numbers: a query is rounded to 15 bits and a sign."""
ROUNDING = {INT8: 0.01, FP8: 0.04}
"""Root mean square error that 8 bits may make in outputs, of that of a value, where all keys are about as important."""

both = pytest.mark.parametrize("dtype", [INT8, FP8])
dtypes = st.sampled_from((INT8, FP8))
q_dtypes = st.sampled_from((torch.float32, torch.bfloat16, torch.float16))
block_sizes = st.sampled_from((1, 4, 16, 24, 64, 128))
sizes = st.sampled_from((1, 5, 16, 33, 64, 80, 96, 128, 256))
heads = st.builds(
    Heads,
    kv_heads=st.integers(1, 3),
    heads_per_kv=st.sampled_from((1, 2, 3, 4, 5, 7, 16, 20)),
    k_size=sizes,
    v_size=sizes,
)
Cache = tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]


def _tolerance(name: str, q_dtype: torch.dtype, dtype: torch.dtype) -> float:
    if name == "avx512_bf16" and q_dtype == torch.bfloat16:
        return BF16
    return INTEGERS if dtype == INT8 and name in ("avx512_bf16", "avx512_vnni") else FP32


def _stored(
    listed: list[Extent], shape: Heads, block_size: int, seed: int, dtype: torch.dtype
) -> tuple[Tensor, Cache, list[PagedSegment]]:
    """q, and a cache that holds what may not be looked at in every slot without a token."""
    generator = torch.Generator().manual_seed(seed)
    segments, num_blocks = random_segments(listed, block_size, generator)
    cache = spoilt_cache(num_blocks, block_size, shape, dtype)
    slots = slots_of(segments, block_size)
    _, k, v = shape.qkv(len(slots), generator)
    store_reference.store_kv(cache[0], cache[1], slots, k, v.clamp(-1, 1), cache[2])
    q, _, _ = shape.qkv(sum(extent.num_queries for extent in listed), generator)
    return q, cache, segments


def _attend(name: str, q: Tensor, cache: Cache, segments: list[PagedSegment], how: Scoring) -> tuple[Tensor, Tensor]:
    keys, values, scales = cache
    assert cpu.takes(q, keys, values)
    return cpu.attend_with(native.load(name), q, keys, values, PagedBatch.build(segments, "cpu"), **how, scales=scales)


def _reference(q: Tensor, cache: Cache, segments: list[PagedSegment], how: Scoring) -> tuple[Tensor, Tensor]:
    keys, values, scales = cache
    return reference.paged_attention(q, keys, values, PagedBatch.build(segments, "cpu"), **how, scales=scales)


# ---- What is stored


@both
def test_the_largest_element_is_met_and_the_others_are_half_a_step_away_at_most(dtype: torch.dtype) -> None:
    """A step is the scale in int8; in fp8 it grows with the element, of which it is an eighth, down to a least one."""
    rows = torch.randn(100, 3, 80) * torch.logspace(-30, 30, 100).view(100, 1, 1)
    stored, scales = quantise(rows, dtype)
    step = torch.tensor(1.0) if dtype == INT8 else (rows.abs() / scales.unsqueeze(-1) / 8).clamp(min=2.0**-9)
    error = (dequantise(stored, scales) - rows).abs()
    assert bool((error <= scales.unsqueeze(-1) * (0.5 * step + 1e-5)).all())
    largest = rows.abs().amax(-1)
    torch.testing.assert_close(dequantise(stored, scales).abs().amax(-1), largest, rtol=1e-6, atol=0.0)


@both
def test_ties_go_to_even_numbers_and_zeros_stay_zeros(dtype: torch.dtype) -> None:
    """Also where nothing but zeros is in a row."""
    ties = {INT8: ([127.0, 2.5, -3.5], [127.0, 2.0, -4.0]), FP8: ([448.0, 17.0, -19.0], [448.0, 16.0, -20.0])}
    row, rounded = ties[dtype]
    stored, scales = quantise(torch.tensor([[*row, 0.0], [0.0, -0.0, 0.0, 0.0]]), dtype)
    assert scales.tolist() == [1.0, 0.0]
    assert stored.float().tolist() == [[*rounded, 0.0], [0.0] * 4]


@both
@pytest.mark.parametrize("bad", [nan, inf, -inf])
def test_a_row_with_a_number_that_is_none_has_a_scale_that_is_none(dtype: torch.dtype, bad: float) -> None:
    """Nothing of it can be taken for a number; the others don't notice."""
    stored, scales = quantise(torch.tensor([[1.0, bad], [1.0, 2.0]]), dtype)
    assert scales.isnan().tolist() == [True, False]
    assert dequantise(stored, scales).isnan().tolist() == [[True, True], [False, False]]


@pytest.mark.slow
@every_build
@both
@pytest.mark.parametrize("row_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_build_stores_just_that(name: str, dtype: torch.dtype, row_dtype: torch.dtype) -> None:
    """To the last bit: rows of any size, ties, the smallest and the largest numbers, and what is no number."""
    generator = torch.Generator().manual_seed(0)
    for size in (1, 5, 33, 64, 80):
        numbers = (
            torch.randint(-(2**31), 2**31, (192, 2, size), generator=generator).to(torch.int32).view(torch.float32)
        )
        numbers[64:128] = torch.randn(64, 2, size, generator=generator) * torch.logspace(-44, 38, 64).view(64, 1, 1)
        numbers[128:] = torch.randint(-900, 901, (64, 2, size), generator=generator) / 2
        rows = numbers.to(row_dtype)
        shape = Heads(2, 1, size, size)
        ours, theirs = spoilt_cache(4, 64, shape, dtype), spoilt_cache(4, 64, shape, dtype)
        slots = torch.randperm(256, generator=generator)[:192]
        assert cpu.takes(rows, *ours[:2])
        store_cpu.store_with(native.load(name), ours[0], ours[1], slots, rows, rows.flip(0), ours[2])
        store_reference.store_kv(theirs[0], theirs[1], slots, rows, rows.flip(0), theirs[2])
        assert ours[2] is not None
        assert theirs[2] is not None
        for actual, expected in zip((*ours[:2], *ours[2]), (*theirs[:2], *theirs[2]), strict=True):
            torch.testing.assert_close(actual.float(), expected.float(), rtol=0, atol=0, equal_nan=True)


@both
def test_without_a_build_the_same_is_stored(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's operators put together."""
    monkeypatch.setattr(store_cpu, "library", lambda: None)
    shape = Heads(2, 1, 24, 40)
    _, k, v = shape.qkv(20, torch.Generator().manual_seed(0))
    ours, theirs = spoilt_cache(4, 8, shape, dtype), spoilt_cache(4, 8, shape, dtype)
    slots = torch.randperm(32)[:20]
    store_kv(ours[0], ours[1], slots, k, v, ours[2])
    store_reference.store_kv(theirs[0], theirs[1], slots, k, v, theirs[2])
    assert ours[2] is not None
    assert theirs[2] is not None
    for actual, expected in zip((*ours[:2], *ours[2]), (*theirs[:2], *theirs[2]), strict=True):
        torch.testing.assert_close(actual.float(), expected.float(), rtol=0, atol=0, equal_nan=True)


def test_scales_that_do_not_fit_are_refused() -> None:
    """A cache of 8 bits has scales of its own shape, another one none."""
    keys, values, scales = spoilt_cache(2, 4, Heads(1, 1, 8, 8), INT8)
    assert scales is not None
    rows, slots = torch.zeros(1, 1, 8), torch.tensor([0])
    with pytest.raises(ValueError, match="need one dtype, and scales"):
        store_kv(keys, values, slots, rows, rows)
    with pytest.raises(ValueError, match=r"torch.float32 \[2, 1, 4\] is needed"):
        store_kv(keys, values, slots, rows, rows, (scales[0], scales[1][:1]))
    with pytest.raises(ValueError, match=r"a cache in torch\.float32 has no scales"):
        store_kv(keys.float(), values.float(), slots, rows, rows, scales)
    batch = PagedBatch.build([PagedSegment([0], 1, 0, 0, 1)], "cpu")
    with pytest.raises(ValueError, match="need one dtype, and scales"):
        paged_attention(rows, keys, values, batch, scale=1.0, window=0, softcap=0.0)


# ---- Attention over it


@pytest.mark.slow
@every_build
@settings(max_examples=80, deadline=None)
@given(st.lists(extents(), max_size=6), heads, block_sizes, windows, softcaps, q_dtypes, dtypes, seeds)
def test_every_build_equals_the_reference(
    name: str,
    listed: list[Extent],
    shape: Heads,
    block_size: int,
    window: int,
    softcap: float,
    q_dtype: torch.dtype,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """Ragged, empty, windowed, capped, grouped, in blocks full of NaN: exact attention over what is stored."""
    q, cache, segments = _stored(listed, shape, block_size, seed, dtype)
    q = q.to(q_dtype)
    how = Scoring(scale=shape.k_size**-0.5, window=window, softcap=softcap)
    expected = _reference(q, cache, segments, how)
    assert_partials_close(_attend(name, q, cache, segments, how), expected, _tolerance(name, q_dtype, dtype))


@settings(max_examples=60, deadline=None)
@given(st.lists(extents(), max_size=6), heads, block_sizes, windows, softcaps, dtypes, seeds)
def test_torchs_form_equals_the_reference(
    listed: list[Extent], shape: Heads, block_size: int, window: int, softcap: float, dtype: torch.dtype, seed: int
) -> None:
    """The form that needs no build, as on devices for which there is none."""
    q, (keys, values, scales), segments = _stored(listed, shape, block_size, seed, dtype)
    how = Scoring(scale=shape.k_size**-0.5, window=window, softcap=softcap)
    expected = _reference(q, (keys, values, scales), segments, how)
    batch = PagedBatch.build(segments, "cpu")
    assert_partials_close(batched.paged_attention(q, keys, values, batch, **how, scales=scales), expected, FP32)


@pytest.mark.slow
@every_build
@both
@pytest.mark.parametrize("q_dtype", [torch.float32, torch.bfloat16])
def test_chunks_of_many_rows_beside_decode_rows(name: str, dtype: torch.dtype, q_dtype: torch.dtype) -> None:
    """Blocks of queries that are full, that are not, and rows that are too few for one: each row in its place."""
    listed = [Extent(50, 0, 49, 1), Extent(130, 0, 130, 300), Extent(70, 0, 70, 3), Extent(90, 0, 40, 90)]
    q, cache, segments = _stored(listed, Heads(2, 3, 80, 33), 16, 1, dtype)
    q = q.to(q_dtype)
    for window in (0, 50):
        how = Scoring(scale=0.1, window=window, softcap=0.0)
        expected = _reference(q, cache, segments, how)
        assert_partials_close(_attend(name, q, cache, segments, how), expected, _tolerance(name, q_dtype, dtype))


@every_build
@both
@pytest.mark.parametrize("heads_per_kv", [4, 20])
def test_outputs_are_near_those_in_full_precision(name: str, dtype: torch.dtype, heads_per_kv: int) -> None:
    """Of random keys and values, int8 within 1 %, fp8 within 4 % of a value, the log-sum-exp in hundredths."""
    generator = torch.Generator().manual_seed(0)
    shape = Heads(2, heads_per_kv, 128, 64)
    segments = [PagedSegment(range(8), 500, 0, 499, 1)]
    q, _, _ = shape.qkv(1, generator)
    _, k, v = shape.qkv(500, generator)
    keys, values, scales = spoilt_cache(8, 64, shape, dtype)
    store_reference.store_kv(keys, values, torch.arange(500), k, v, scales)
    full = torch.empty(8, 2, 64, 128), torch.empty(8, 2, 64, 64)
    store_reference.store_kv(full[0], full[1], torch.arange(500), k, v)
    how = Scoring(scale=128**-0.5, window=0, softcap=0.0)
    exact = _reference(q, (*full, None), segments, how)
    ours = _attend(name, q.bfloat16(), (keys, values, scales), segments, how)
    rounded = _reference(q.bfloat16(), (*full, None), segments, how)
    error = (ours[0] - rounded[0]).square().mean().sqrt() / v.square().mean().sqrt()
    assert float(error) < ROUNDING[dtype] / 10, "errors of 500 values nearly cancel"
    assert float((ours[1] - exact[1]).abs().max()) < ROUNDING[dtype]


@every_build
@both
@pytest.mark.parametrize("q_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [nan, inf])
@pytest.mark.parametrize("where", ["key", "value"])
@pytest.mark.parametrize("rows", [1, 30])
def test_what_is_no_number_reaches_those_who_see_it_and_nobody_else(
    name: str, dtype: torch.dtype, q_dtype: torch.dtype, bad: float, where: str, rows: int
) -> None:
    """An answer that is wrong can't be taken for a number; other heads and sequences get theirs."""
    shape = Heads(2, 2, 64, 64)
    q, cache, segments = _stored([Extent(70, 0, 69, rows), Extent(70, 0, 69, rows)], shape, 16, 3, dtype)
    q, how = q.to(q_dtype), Scoring(scale=0.125, window=0, softcap=0.0)
    keys, values, scales = cache
    assert scales is not None
    expected = _reference(q, cache, segments, how)
    k, v = torch.ones(1, 2, 64), torch.ones(1, 2, 64)
    (k if where == "key" else v)[0, 0, 5] = bad
    slot = torch.tensor([segments[0].blocks[4] * 16 + 5])  # key 69, the last one
    before = scales[0][segments[0].blocks[4], 1, 5].clone(), scales[1][segments[0].blocks[4], 1, 5].clone()
    other = keys[segments[0].blocks[4], 1, 5].clone(), values[segments[0].blocks[4], 1, 5].clone()
    store_cpu.store_with(native.load(name), keys, values, slot, k, v, scales)
    block = segments[0].blocks[4]
    scales[0][block, 1, 5], scales[1][block, 1, 5] = before
    keys[block, 1, 5], values[block, 1, 5] = other
    o, lse = _attend(name, q, cache, segments, how)
    assert bool(o[:rows, :2].isnan().all())
    assert bool(lse[:rows, :2].isnan().all()) == (where == "key")
    tolerance = _tolerance(name, q_dtype, dtype)
    assert_partials_close((o[:, 2:], lse[:, 2:]), (expected[0][:, 2:], expected[1][:, 2:]), tolerance)
    assert_partials_close((o[rows:], lse[rows:]), (expected[0][rows:], expected[1][rows:]), tolerance)


@every_build
@both
@pytest.mark.parametrize("factor", [1e-20, 1e-4, 1e4, 1e20])
def test_keys_and_values_of_any_magnitude(name: str, dtype: torch.dtype, factor: float) -> None:
    """Outputs grow with the values; keys and a query of opposite magnitudes give the same scores."""
    shape = Heads(2, 4, 64, 64)
    generator = torch.Generator().manual_seed(0)
    q, _, _ = shape.qkv(1, generator)
    _, k, v = shape.qkv(100, generator)
    segments, how = [PagedSegment(range(7), 100, 0, 99, 1)], Scoring(scale=0.125, window=0, softcap=0.0)
    keys, values, scales = spoilt_cache(7, 16, shape, dtype)
    store_reference.store_kv(keys, values, torch.arange(100), k * factor, v * factor, scales)
    for q_dtype in (torch.float32, torch.bfloat16):
        row = (q / factor).to(q_dtype)
        cache = (keys, values, scales)
        (o, lse), expected = _attend(name, row, cache, segments, how), _reference(row, cache, segments, how)
        ours, theirs = (o / factor, lse), (expected[0] / factor, expected[1])
        assert_partials_close(ours, theirs, _tolerance(name, q_dtype, dtype))


@pytest.mark.slow
@every_build
@both
def test_a_thousand_small_weights_are_not_lost_beside_a_large_one(name: str, dtype: torch.dtype) -> None:
    """The first token takes half of the weight, as in many models; the others' part of the output is still right."""
    shape = Heads(1, 2, 64, 64)
    segments, how = [PagedSegment(range(64), 4000, 0, 3999, 1)], Scoring(scale=1.0, window=0, softcap=0.0)
    generator = torch.Generator().manual_seed(0)
    q = torch.zeros(1, 2, 64)
    q[..., 0] = 8.3
    k, v = 0.01 * torch.randn(4000, 1, 64, generator=generator), torch.ones(4000, 1, 64)
    k[0, 0, 0], v[0] = 1.0, -1.0
    keys, values, scales = spoilt_cache(64, 64, shape, dtype)
    store_reference.store_kv(keys, values, torch.arange(4000), k, v, scales)
    expected = _reference(q, (keys, values, scales), segments, how)
    assert float(expected[0].abs().max()) < 0.1
    for q_dtype in (torch.float32, torch.bfloat16):
        expected = _reference(q.to(q_dtype), (keys, values, scales), segments, how)
        found = _attend(name, q.to(q_dtype), (keys, values, scales), segments, how)
        assert_partials_close(found, expected, _tolerance(name, q_dtype, dtype))
