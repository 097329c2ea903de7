"""Tables for the Triton kernels: every key once, and enough programs for a GPU. These tests need no triton."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pannier.ops import PagedSegment
from pannier.ops.paged_attention.triton_plan import Merge, Part, TritonGeometry, TritonPlan, make_triton_plan

from .shapes import Extent, extents, random_segments, seeds, windows

GEOMETRY = TritonGeometry(
    window=0,
    num_blocks=10_000,
    block_size=16,
    kv_heads=8,
    heads_per_kv=4,
    v_size=128,
    few_pairs=4,
    many_pairs=64,
    tile_keys=64,
    least_keys=256,
    num_programs=528,
)


def _plan(segments: Sequence[PagedSegment], geometry: TritonGeometry) -> TritonPlan:
    return make_triton_plan(segments, geometry, torch.device("cpu"))


def _parts(plan: TritonPlan) -> list[Part]:
    return [Part(*numbers) for parts in plan.parts for numbers in parts.table.tolist()]


def _merges(plan: TritonPlan) -> list[Merge]:
    return [Merge(*numbers) for numbers in plan.merges.tolist()]


def _decode(lengths: Sequence[int]) -> list[PagedSegment]:
    return [PagedSegment(range(-(-length // 16)), length, 0, length - 1, 1) for length in lengths]


@settings(max_examples=100, deadline=None)
@given(st.lists(extents(), max_size=6), st.sampled_from((1, 4)), windows, st.sampled_from((16, 32)), seeds)
def test_each_pair_gets_the_keys_that_it_sees_once(
    listed: list[Extent], heads_per_kv: int, window: int, least_keys: int, seed: int
) -> None:
    """The ranges of a pair lie one behind the other, and what is split is merged."""
    segments, num_blocks = random_segments(listed, 16, torch.Generator().manual_seed(seed))
    geometry = GEOMETRY._replace(
        window=window, num_blocks=num_blocks, heads_per_kv=heads_per_kv, tile_keys=16, least_keys=least_keys
    )
    plan = _plan(segments, geometry)
    seen: dict[int, list[int]] = {}
    for part in _parts(plan):
        for pair in range(part.first_pair, part.first_pair + part.num_pairs):
            row = pair // heads_per_kv
            keys = range(part.start, part.stop)
            mine = [j for j in keys if j <= row + part.shift and (not window or j > row + part.shift - window)]
            blocks = plan.blocks[part.table :].tolist()
            seen.setdefault(pair, []).extend(blocks[j // 16] * 16 + j % 16 for j in mine)
    for pair, slots in seen.items():
        assert sorted(slots) == sorted(_slots_seen(segments, pair // heads_per_kv, window))
    rows = [row for row in range(sum(extent.num_queries for extent in listed)) if _slots_seen(segments, row, window)]
    assert sorted(seen) == [row * heads_per_kv + head for row in rows for head in range(heads_per_kv)]
    split = sum(merge.num_pairs * merge.num_splits for merge in _merges(plan))
    assert split == len(plan.partial_lse) == sum(part.num_pairs for part in _parts(plan) if part.target >= 0)


def _slots_seen(segments: Sequence[PagedSegment], row: int, window: int) -> list[int]:
    for segment in segments:
        if row < segment.num_queries:
            position = segment.query_position + row
            positions = range(segment.first_position, segment.first_position + segment.num_keys)
            seen = [
                p - segment.first_position for p in positions if p <= position and (not window or p > position - window)
            ]
            return [segment.blocks[j // 16] * 16 + j % 16 for j in seen]
        row -= segment.num_queries
    raise AssertionError("there is no such row")


@pytest.mark.parametrize("lengths", [[100_000], [5000] * 7, [40, 60_000, 3000]], ids=str)
def test_few_long_sequences_fill_a_gpu(lengths: list[int]) -> None:
    """They are split into about as many programs as keep it busy, none much longer than the others."""
    plan = _plan(_decode(lengths), GEOMETRY)
    programs = len(_parts(plan)) * GEOMETRY.kv_heads
    assert 0.7 * GEOMETRY.num_programs <= programs <= 1.3 * GEOMETRY.num_programs
    assert max(part.stop - part.start for part in _parts(plan)) <= 1.6 * sum(lengths) / len(_parts(plan))


@pytest.mark.parametrize("lengths", [[250], [4096] * 64, [200] * 500], ids=str)
def test_what_is_short_or_fills_it_anyhow_stays_whole(lengths: list[int]) -> None:
    """No merge where it would gain nothing."""
    plan = _plan(_decode(lengths), GEOMETRY)
    assert len(_parts(plan)) == len(lengths)
    assert _merges(plan) == []


def test_tables_lie_where_triton_needs_no_kernel_anew() -> None:
    """Each at a multiple of 16 bytes, whatever the lengths."""
    segments = [*_decode([100, 30_000, 47]), PagedSegment(range(3), 40, 0, 40, 21)]
    plan = _plan(segments, GEOMETRY)
    tables = [parts.table for parts in plan.parts]
    assert len(tables) == 2
    assert {table.data_ptr() % 16 for table in (*tables, plan.merges, plan.blocks)} == {0}
