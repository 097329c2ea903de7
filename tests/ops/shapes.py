"""Awkward shapes for the operators' tests."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

import torch
from hypothesis import strategies as st
from torch import Tensor

from pannier.ops import PagedSegment
from pannier.ops.quantise import is_scaled

SIZES = (1, 5, 16, 33, 64, 80, 96)
FP32 = 1e-5
BF16 = 2**-8
"""Weights and outputs are both rounded to 8 bits, each by 2**-9 at most, where values are within -1 to 1."""


@dataclass(frozen=True)
class Heads:
    """Heads of one call: G, H/G, Dk, Dv."""

    kv_heads: int
    heads_per_kv: int
    k_size: int
    v_size: int

    @property
    def q_heads(self) -> int:
        return self.kv_heads * self.heads_per_kv

    def qkv(self, rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Random q [rows, H, Dk], k [rows, G, Dk], v [rows, G, Dv]."""
        return (
            torch.randn(rows, self.q_heads, self.k_size, generator=generator),
            torch.randn(rows, self.kv_heads, self.k_size, generator=generator),
            torch.randn(rows, self.kv_heads, self.v_size, generator=generator),
        )


heads = st.builds(
    Heads,
    kv_heads=st.integers(1, 3),
    heads_per_kv=st.sampled_from((1, 2, 3, 7, 16)),
    k_size=st.sampled_from(SIZES),
    v_size=st.sampled_from(SIZES),
)
windows = st.sampled_from((0, 1, 2, 5, 16, 40, 1000))
softcaps = st.sampled_from((0.0, 0.0, 2.0, 30.0))
seeds = st.integers(0, 2**31)


class Scoring(TypedDict):
    """How one call scores its keys."""

    scale: float
    window: int
    softcap: float


@dataclass(frozen=True)
class Extent:
    """A segment without its blocks."""

    num_keys: int
    first_position: int
    query_position: int
    num_queries: int


@st.composite
def extents(draw: st.DrawFn) -> Extent:
    """Decode rows, chunks behind their past, queries before or inside the keys, and nothing stored."""
    num_keys = draw(st.sampled_from((0, 1, 2, 7, 16, 17, 50)))
    first_position = draw(st.sampled_from((0, 0, 0, 3, 64)))
    num_queries = draw(st.sampled_from((0, 1, 1, 1, 2, 9)))
    query_position = max(0, first_position + num_keys + draw(st.integers(-12, 12)))
    return Extent(num_keys, first_position, query_position, num_queries)


def random_segments(
    listed: Sequence[Extent], block_size: int, generator: torch.Generator
) -> tuple[list[PagedSegment], int]:
    """Segments over shuffled blocks of their own, some with a block to spare; and how many blocks there are."""
    needed = [-(-extent.num_keys // block_size) + number % 2 for number, extent in enumerate(listed)]
    num_blocks = sum(needed) + 2
    free = torch.randperm(num_blocks, generator=generator).tolist()
    segments = []
    for extent, count in zip(listed, needed, strict=True):
        blocks, free = free[:count], free[count:]
        segments.append(
            PagedSegment(blocks, extent.num_keys, extent.first_position, extent.query_position, extent.num_queries)
        )
    return segments, num_blocks


def nan_cache(num_blocks: int, block_size: int, shape: Heads) -> tuple[Tensor, Tensor]:
    """Keys [P, G, K, Dk] and values [P, G, K, Dv] of NaN, as freed blocks may hold anything."""
    lead = (num_blocks, shape.kv_heads, block_size)
    return torch.full((*lead, shape.k_size), float("nan")), torch.full((*lead, shape.v_size), float("nan"))


def spoilt_cache(
    num_blocks: int, block_size: int, shape: Heads, dtype: torch.dtype
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
    """Keys, values and scales, if the dtype has some, none of which may be looked at: NaN where there is one."""
    if not is_scaled(dtype):
        keys, values = nan_cache(num_blocks, block_size, shape)
        return keys.to(dtype), values.to(dtype), None
    lead = (num_blocks, shape.kv_heads, block_size)
    keys, values = (torch.full((*lead, size), -1, dtype=torch.int8) for size in (shape.k_size, shape.v_size))
    scales = (torch.full(lead, torch.nan), torch.full(lead, torch.nan))
    return keys.view(dtype), values.view(dtype), scales


def slots_of(segments: Sequence[PagedSegment], block_size: int) -> Tensor:
    """int64 [N]: the slots of the keys of all segments."""
    return torch.tensor(
        [
            segment.blocks[j // block_size] * block_size + j % block_size
            for segment in segments
            for j in range(segment.num_keys)
        ],
        dtype=torch.int64,
    )


def assert_partials_close(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], tolerance: float) -> None:
    """Outputs and log-sum-exps are fp32 and agree, relative above 1 and absolute below."""
    for name, ours, theirs in zip(("o", "lse"), actual, expected, strict=True):
        assert ours.dtype == torch.float32, name
        difference = (ours - theirs).masked_fill(ours == theirs, 0.0).abs().nan_to_num(nan=torch.inf)
        allowed = tolerance * theirs.abs().nan_to_num(posinf=0.0).clamp(min=1.0)
        assert bool((difference <= allowed).all()), f"{name} differs by {difference.max()}, allowed are {tolerance}"
