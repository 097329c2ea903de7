"""However the keys are split, the merged partials are full attention."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pannier.ops import PagedBatch, PagedSegment, chunk_attention, merge_partials, merge_sinks, paged_attention
from pannier.ops.merge_partials import reference

from .builds import every_form, operators_of
from .shapes import FP32, Heads, Scoring, assert_partials_close, heads, nan_cache, seeds, softcaps, windows

pytestmark = pytest.mark.timeout(60)


def _full(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, softcap: float, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Causal attention of all rows over all rows in fp64; a sink is one more score, without a value."""
    rows, q_heads, _ = q.shape
    k, v = (tensor.double().repeat_interleave(q_heads // k.shape[1], dim=1) for tensor in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q.double(), k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(rows)[:, None] - torch.arange(rows)
    hidden = (distance < 0) | (distance >= window) if window else distance < 0
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, rows, 1)], dim=2)
    weights = torch.softmax(scores, dim=2)[:, :, :rows]
    return torch.einsum("hij,jhd->ihd", weights, v).float(), torch.logsumexp(scores, dim=2).T.float()


@every_form
@settings(max_examples=80, deadline=None)
@given(
    st.integers(1, 50), st.lists(st.integers(0, 50), max_size=4), st.integers(0, 50), heads, windows, softcaps,
    st.booleans(), seeds,
)  # fmt: skip
def test_random_splits_merge_to_full_attention(
    name: str,
    rows: int,
    cuts: list[int],
    chunk: int,
    shape: Heads,
    window: int,
    softcap: float,
    with_sinks: bool,
    seed: int,
) -> None:
    """The past in random parts (empty ones too), each over its own keys, then the chunk itself, then the sinks."""
    with operators_of(name):
        _check_split(rows, cuts, max(0, rows - chunk), shape, window, softcap, with_sinks, seed)


def _check_split(
    rows: int, cuts: list[int], past: int, shape: Heads, window: int, softcap: float, with_sinks: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = shape.qkv(rows, generator)
    how = Scoring(scale=shape.k_size**-0.5, window=window, softcap=softcap)
    merged = chunk_attention(q[past:], k[past:], v[past:], [rows - past], **how)
    edges = [0, *sorted(min(cut, past) for cut in cuts), past]
    for start, stop in pairwise(edges):
        keys, values = nan_cache(1, max(1, stop - start), shape)  # one block of just that many tokens
        keys[0, :, : stop - start] = k[start:stop].transpose(0, 1)
        values[0, :, : stop - start] = v[start:stop].transpose(0, 1)
        batch = PagedBatch.build([PagedSegment([0], stop - start, start, past, rows - past)], "cpu")
        merged = merge_partials(*merged, *paged_attention(q[past:], keys, values, batch, **how))
    sinks = torch.randn(shape.q_heads, generator=generator) * 3 if with_sinks else None
    if sinks is not None:
        merged = merge_sinks(*merged, sinks)
    o, lse = _full(q, k, v, **how, sinks=sinks)
    assert_partials_close(merged, (o[past:], lse[past:]), FP32)


def _partial(rows: int, shape: Heads, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Log-sum-exps of unlike size; about a third are empty."""
    o = torch.randn(rows, shape.q_heads, shape.v_size, generator=generator)
    lse = torch.randn(rows, shape.q_heads, generator=generator) * 20
    empty = torch.rand(rows, shape.q_heads, generator=generator) < 0.3
    return o.masked_fill(empty[..., None], 0.0), lse.masked_fill(empty, float("-inf"))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 9), heads, seeds)
def test_the_fused_forms_equal_the_formula(rows: int, shape: Heads, seed: int) -> None:
    """Parts of unlike weight, one or both empty: as DESIGN has it, to 1e-5."""
    generator = torch.Generator().manual_seed(seed)
    one, other = _partial(rows, shape, generator), _partial(rows, shape, generator)
    sinks = torch.randn(shape.q_heads, generator=generator) * 10
    assert_partials_close(merge_partials(*one, *other), reference.merge_partials(*one, *other), FP32)
    assert_partials_close(merge_sinks(*one, sinks), reference.merge_sinks(*one, sinks), FP32)


def test_two_empties_give_an_empty() -> None:
    """Nothing merged with nothing is (0, -inf), not NaN."""
    empty = torch.zeros(2, 3, 4), torch.full((2, 3), float("-inf"))
    o, lse = merge_partials(*empty, *empty)
    assert torch.equal(o, empty[0])
    assert torch.equal(lse, empty[1])


def test_answers_in_bf16_are_merged_in_fp32() -> None:
    """Outputs may come in the wire's dtype; the merged one is fp32 and exact on them."""
    o, lse = _partial(5, Heads(1, 3, 8, 8), torch.Generator().manual_seed(0))
    merged = merge_partials(o.bfloat16(), lse, o, lse + 1)
    assert_partials_close(merged, reference.merge_partials(o.bfloat16().float(), lse, o, lse + 1), FP32)
