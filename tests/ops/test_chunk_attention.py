"""Causal attention inside chunks agrees with its definition."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pannier.ops import chunk_attention
from pannier.ops.chunk_attention import reference

from .shapes import BF16, FP32, Heads, Scoring, assert_partials_close, heads, seeds, softcaps, windows

pytestmark = pytest.mark.timeout(60)
chunks = st.lists(st.sampled_from((0, 1, 1, 2, 7, 33, 70)), max_size=5)


@settings(max_examples=100, deadline=None)
@given(chunks, heads, windows, softcaps, seeds)
def test_fp32_equals_the_reference(lengths: list[int], shape: Heads, window: int, softcap: float, seed: int) -> None:
    """Ragged and empty chunks, windows shorter and longer, grouped heads, unequal sizes: to 1e-5."""
    q, k, v = shape.qkv(sum(lengths), torch.Generator().manual_seed(seed))
    how = Scoring(scale=shape.k_size**-0.5, window=window, softcap=softcap)
    expected = reference.chunk_attention(q, k, v, lengths, **how)
    assert_partials_close(chunk_attention(q, k, v, lengths, **how), expected, FP32)


@settings(max_examples=40, deadline=None)
@given(chunks, heads, windows, softcaps, seeds)
def test_bf16_equals_the_reference_on_the_same_inputs(
    lengths: list[int], shape: Heads, window: int, softcap: float, seed: int
) -> None:
    """The reference, exact on the bf16 inputs, differs by the rounding of bf16 at most."""
    q, k, v = (tensor.bfloat16() for tensor in shape.qkv(sum(lengths), torch.Generator().manual_seed(seed)))
    v = v.clamp(-1, 1)
    how = Scoring(scale=shape.k_size**-0.5, window=window, softcap=softcap)
    expected = reference.chunk_attention(q, k, v, lengths, **how)
    assert_partials_close(chunk_attention(q, k, v, lengths, **how), expected, BF16)


def test_views_of_packed_rows_need_no_copy() -> None:
    """q, k and v may be slices of one packed projection."""
    packed = torch.randn(20, 4 * 16 + 2 * 16 + 2 * 16, generator=torch.Generator().manual_seed(0))
    q, k, v = (part.unflatten(1, (-1, 16)) for part in packed.split((64, 32, 32), dim=1))
    how = Scoring(scale=0.25, window=6, softcap=0.0)
    expected = chunk_attention(q.contiguous(), k.contiguous(), v.contiguous(), [12, 8], **how)
    assert_partials_close(chunk_attention(q, k, v, [12, 8], **how), expected, FP32)


@pytest.mark.parametrize(
    ("lengths", "kv_heads", "message"),
    [
        ([3], 2, r"lengths are \[3\]; they must not be negative and sum up to the 4 rows"),
        ([5, -1], 2, r"lengths are \[5, -1\]"),
        ([4], 3, "q has 4 heads; a multiple of the 3 KV heads"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(lengths: list[int], kv_heads: int, message: str) -> None:
    """One sentence names what was given and what fits."""
    k = torch.zeros(4, kv_heads, 8)
    with pytest.raises(ValueError, match=message):
        chunk_attention(torch.zeros(4, 4, 8), k, k, lengths, scale=1.0, window=0, softcap=0.0)
