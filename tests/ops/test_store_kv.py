"""What is stored lies where its slot says, and nothing else changes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pannier.ops import store_kv
from pannier.ops.store_kv import reference

from .shapes import Heads, heads, nan_cache, seeds

pytestmark = pytest.mark.timeout(60)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 40), heads, st.sampled_from((1, 4, 16)), st.sampled_from((torch.float32, torch.bfloat16)), seeds)
def test_equals_the_reference_in_every_slot(
    rows: int, shape: Heads, block_size: int, dtype: torch.dtype, seed: int
) -> None:
    """Rows are cast to the cache's dtype; slots that weren't named keep what they held."""
    generator = torch.Generator().manual_seed(seed)
    num_blocks = -(-rows // block_size) + 2
    slots = torch.randperm(num_blocks * block_size, generator=generator)[:rows]
    _, k, v = shape.qkv(rows, generator)
    ours = [cache.to(dtype) for cache in nan_cache(num_blocks, block_size, shape)]
    theirs = [cache.clone() for cache in ours]
    store_kv(ours[0], ours[1], slots, k, v)
    reference.store_kv(theirs[0], theirs[1], slots, k, v)
    for actual, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def test_rows_that_do_not_fit_are_refused() -> None:
    """One sentence says what was given and what the cache takes; nothing is broadcast."""
    keys, values = nan_cache(2, 4, Heads(2, 1, 8, 8))
    slots = torch.tensor([0, 1])
    with pytest.raises(ValueError, match=r"k has shape \[2, 1, 8\]; 2 slots of this cache take \[2, 2, 8\]"):
        store_kv(keys, values, slots, torch.zeros(2, 1, 8), torch.zeros(2, 2, 8))


def test_a_slot_behind_the_last_one_is_refused() -> None:
    """A slot that the cache hasn't got never writes other memory."""
    keys, values = nan_cache(2, 4, Heads(1, 1, 8, 8))
    with pytest.raises(IndexError):
        store_kv(keys, values, torch.tensor([8]), torch.zeros(1, 1, 8), torch.zeros(1, 1, 8))
