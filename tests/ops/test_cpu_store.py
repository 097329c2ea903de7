"""Every build of the C++ form stores what the definition stores, to the last bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pannier.ops import native
from pannier.ops.store_kv import cpu, reference

from .builds import every_build
from .shapes import Heads, heads, nan_cache, seeds

pytestmark = pytest.mark.timeout(60)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
dtypes = st.sampled_from(DTYPES)


@every_build
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 40), heads, st.sampled_from((1, 4, 16)), dtypes, dtypes, seeds)
def test_equals_the_reference_in_every_slot(
    name: str, rows: int, shape: Heads, block_size: int, row_dtype: torch.dtype, kv_dtype: torch.dtype, seed: int
) -> None:
    """Rows of any dtype, slices of packed ones, into a cache of any dtype; other slots keep what they held."""
    generator = torch.Generator().manual_seed(seed)
    num_blocks = -(-rows // block_size) + 2
    slots = torch.randperm(num_blocks * block_size, generator=generator)[:rows]
    _, k, v = shape.qkv(rows, generator)
    k, v = torch.cat([k, v], dim=2).to(row_dtype).split((shape.k_size, shape.v_size), dim=2)
    ours = [cache.to(kv_dtype) for cache in nan_cache(num_blocks, block_size, shape)]
    theirs = [cache.clone() for cache in ours]
    assert cpu.takes(ours[0], ours[1], slots, k, v)
    cpu.store_with(native.load(name), ours[0], ours[1], slots, k, v)
    reference.store_kv(theirs[0], theirs[1], slots, k, v)
    for actual, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@every_build
@pytest.mark.parametrize("kv_dtype", DTYPES)
@pytest.mark.parametrize("row_dtype", DTYPES)
def test_numbers_of_every_size_are_rounded_as_torch_does(
    name: str, row_dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    """Ties, subnormal numbers, those that overflow, infinities and NaN."""
    patterns = torch.randint(-(2**31), 2**31, (64 * 64,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    ties = (torch.arange(64 * 64, dtype=torch.int32) << 12) + 0x38000000
    small = torch.linspace(-(2.0**-13), 2.0**-13, 64 * 64)
    special = torch.tensor(
        [0.0, -0.0, 65504.0, 65519.9, 65520.0, 1e30, -1e30, torch.inf, -torch.inf, torch.nan, 2**-25]
    )
    special = torch.cat([special, torch.zeros(64 * 64 - len(special))])
    for numbers in (patterns.view(torch.float32), ties.view(torch.float32), small, special):
        rows = numbers.to(row_dtype).view(64, 1, 64)
        keys, values = (cache.to(kv_dtype) for cache in nan_cache(1, 64, Heads(1, 1, 64, 64)))
        cpu.store_with(native.load(name), keys, values, torch.arange(64), rows, rows)
        expected = rows.to(kv_dtype).view(64, 64)
        torch.testing.assert_close(keys[0, 0], expected, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(torch.signbit(keys[0, 0][expected == 0]), torch.signbit(expected[expected == 0]))


@every_build
@pytest.mark.parametrize("slot", [-1, 8])
def test_a_slot_that_does_not_exist_is_refused(name: str, slot: int) -> None:
    """And nothing is written."""
    keys, values = nan_cache(2, 4, Heads(1, 1, 8, 8))
    rows = torch.zeros(2, 1, 8)
    with pytest.raises(IndexError, match=r"a slot is outside 0\.\.7"):
        cpu.store_with(native.load(name), keys, values, torch.tensor([0, slot]), rows, rows)
    assert bool(keys.isnan().all())


@every_build
def test_many_rows_are_stored_by_several_threads(name: str) -> None:
    """Each once, in its own slot."""
    shape = Heads(4, 1, 64, 64)
    _, k, v = shape.qkv(1000, torch.Generator().manual_seed(0))
    slots = torch.randperm(1024, generator=torch.Generator().manual_seed(0))[:1000]
    keys, values = nan_cache(16, 64, shape)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        cpu.store_with(native.load(name), keys, values, slots, k, v)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(keys[slots // 64, :, slots % 64], k)
    assert torch.equal(values[slots // 64, :, slots % 64], v)
