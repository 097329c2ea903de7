"""Every build of the C++ form that this processor runs agrees with the definition of attention inside chunks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pannier.ops import native
from pannier.ops.chunk_attention import cpu, reference

from .builds import every_build
from .shapes import FP32, Heads, Scoring, assert_partials_close, seeds, softcaps, windows

pytestmark = pytest.mark.timeout(120)
BF16 = 3e-3
"""Where bf16 meets bf16, weights are rounded to 8 bits, each by 2**-9 at most; values are within -1 to 1."""
PLAIN = Scoring(scale=0.125, window=0, softcap=0.0)

dtypes = st.sampled_from((torch.float32, torch.bfloat16, torch.float16))
chunks = st.lists(st.sampled_from((0, 1, 2, 7, 16, 33, 64, 65, 140)), max_size=5)
sizes = st.sampled_from((1, 5, 16, 33, 64, 80, 96, 128, 256))
heads = st.builds(
    Heads, kv_heads=st.integers(1, 3), heads_per_kv=st.sampled_from((1, 2, 3, 4, 7, 20)), k_size=sizes, v_size=sizes
)


def _packed(shape: Heads, rows: int, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as slices of one projection; values within -1 to 1."""
    q, k, v = shape.qkv(rows, torch.Generator().manual_seed(seed))
    packed = torch.cat([part.flatten(1) for part in (q, k, v.clamp(-1, 1))], dim=1).to(dtype)
    widths = shape.q_heads * shape.k_size, shape.kv_heads * shape.k_size, shape.kv_heads * shape.v_size
    parts = packed.split(widths, dim=1)
    return parts[0].view(q.shape), parts[1].view(k.shape), parts[2].view(v.shape)


@pytest.mark.slow
@every_build
@settings(max_examples=120, deadline=None)
@given(chunks, heads, windows, softcaps, dtypes, seeds)
def test_equals_the_reference(
    name: str, lengths: list[int], shape: Heads, window: int, softcap: float, dtype: torch.dtype, seed: int
) -> None:
    """Ragged, empty, windowed, capped, grouped, of unequal sizes: as the exact reference on the same numbers."""
    q, k, v = _packed(shape, sum(lengths), dtype, seed)
    how = Scoring(scale=shape.k_size**-0.5, window=window, softcap=softcap)
    assert cpu.takes(q, k, v)
    actual = cpu.attend_with(native.load(name), q, k, v, lengths, **how)
    expected = reference.chunk_attention(q, k, v, lengths, **how)
    assert_partials_close(actual, expected, BF16 if dtype == torch.bfloat16 else FP32)


@every_build
def test_threads_get_what_one_thread_gets(name: str) -> None:
    """To the last bit, over and over: no block is lost, done twice or mixed up with another."""
    lengths = [300, 0, 1, 17, 130]
    q, k, v = _packed(Heads(3, 3, 64, 64), sum(lengths), torch.bfloat16, 0)
    built = native.load(name)
    alone = cpu.attend_with(built, q, k, v, lengths, **PLAIN)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for _ in range(10):
            shared = cpu.attend_with(built, q, k, v, lengths, **PLAIN)
            assert torch.equal(shared[0], alone[0])
            assert torch.equal(shared[1], alone[1])
    finally:
        torch.set_num_threads(threads)


@every_build
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_no_number_stays_in_its_chunk(name: str, dtype: torch.dtype) -> None:
    """Chunks beside it are what they are alone."""
    lengths = [5, 3, 70]
    q, k, v = _packed(Heads(2, 2, 16, 16), sum(lengths), dtype, 0)
    built = native.load(name)
    expected = cpu.attend_with(built, q, k, v, lengths, **PLAIN)
    for tensor in (q, k, v):
        tensor[5:8] = torch.nan
    actual = cpu.attend_with(built, q, k, v, lengths, **PLAIN)
    for ours, theirs in zip(actual, expected, strict=True):
        assert torch.equal(ours[:5], theirs[:5])
        assert torch.equal(ours[8:], theirs[8:])


@every_build
def test_scores_of_hundreds_neither_overflow_nor_lose_the_largest(name: str) -> None:
    """The largest may come first, last or amid others, in a tile of its own or not; one that is -inf weighs nothing."""
    for largest in (0, 63, 64, 130, 199):
        q, k, v = _packed(Heads(1, 3, 64, 64), 200, torch.float32, largest)
        q[:, :, 0], k[:, :, 0], k[7, :, 0] = 1.0, 0.0, -torch.inf
        k[largest] = q[199, 1] * 2
        how = Scoring(scale=8.0, window=0, softcap=0.0)
        expected = reference.chunk_attention(q, k, v, [200], **how)
        assert_partials_close(cpu.attend_with(native.load(name), q, k, v, [200], **how), expected, 1e-4)


@every_build
def test_numbers_beside_zeros_are_not_flushed_with_them(name: str) -> None:
    """Two bf16 of which one is zero have, as 32 bits, the look of a number that is too small to be normal."""
    q, k, v = _packed(Heads(2, 2, 64, 64), 40, torch.bfloat16, 0)
    for tensor in (q, k, v):
        tensor[..., 1::2] = 0.0
    expected = reference.chunk_attention(q, k, v, [40], **PLAIN)
    torch.set_flush_denormal(True)
    try:
        actual = cpu.attend_with(native.load(name), q, k, v, [40], **PLAIN)
    finally:
        torch.set_flush_denormal(False)
    assert_partials_close(actual, expected, BF16)


def test_tensors_of_two_dtypes_take_torch() -> None:
    """What the C++ form doesn't read isn't refused."""
    q, k, v = _packed(Heads(2, 2, 16, 16), 20, torch.float32, 0)
    assert not cpu.takes(q, k.double(), v)
    assert not cpu.takes(q, k, v.transpose(0, 2))
