"""From segments to the tables that `triton_kernels.py` reads: which pairs attend over which keys, in how many parts."""

from array import array
from collections.abc import Iterable, Sequence
from itertools import chain, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from pannier.ops.paged_attention.plan import existing_views
from pannier.ops.paged_attention.segment import PagedSegment, View


class TritonGeometry(NamedTuple):
    """What of a call decides its tables; equal for the calls of a model but for two or three kinds."""

    window: int
    num_blocks: int
    block_size: int
    kv_heads: int
    heads_per_kv: int
    v_size: int
    few_pairs: int
    """Pairs in a tile of a decode row, at least `heads_per_kv` where that is possible."""
    many_pairs: int
    """Pairs in a tile of a segment that has more."""
    tile_keys: int
    """Parts begin a multiple of so many keys after the first one of a split range."""
    least_keys: int
    """Shorter parts aren't worth the merge."""
    num_programs: int
    """Ranges are split until there are so many, if they are long enough."""


class Part(NamedTuple):
    """What a program does for each KV head; see `attend` in `triton_kernels.py`."""

    table: int
    start: int
    stop: int
    shift: int
    first_pair: int
    num_pairs: int
    target: int
    """Where its partials begin among the partials, or -1: they are the result."""
    unused: int = 0


class Merge(NamedTuple):
    """Partials that make one result: split s of pair i is at target + s * num_pairs + i."""

    first_pair: int
    num_pairs: int
    target: int
    num_splits: int


class Parts(NamedTuple):
    """Parts whose tiles are of one size."""

    tile_pairs: int
    table: Tensor
    """int32 [parts, 8], the longest first."""


class TritonPlan(NamedTuple):
    """What a call of this geometry does."""

    covers_all: bool
    """Whether every row sees something and is written."""
    parts: tuple[Parts, ...]
    blocks: Tensor
    """int32: the block numbers of all segments."""
    merges: Tensor
    """int32 [merges, 4]."""
    merge_pairs: int
    """Of the merge that has the most."""
    partial_o: Tensor
    """fp32 [partials, G, Dv]"""
    partial_lse: Tensor
    """fp32 [partials, G]"""


class _Tile(NamedTuple):
    """Pairs that go over a range of keys together, not split yet."""

    tile_pairs: int
    part: Part

    @property
    def num_keys(self) -> int:
        return self.part.stop - self.part.start


def make_triton_plan(segments: Sequence[PagedSegment], geometry: TritonGeometry, device: torch.device) -> TritonPlan:
    """Tables for these segments, in one copy to the device.

    Raises ValueError when blocks are missing, IndexError for a block number behind the last one.
    """
    views, num_rows = existing_views(segments, geometry.window, geometry.block_size, geometry.num_blocks)
    tiles: list[_Tile] = []
    blocks = array("i")
    for view in views:
        tiles.extend(_tiles(view, len(blocks), geometry))
        blocks.extend(view.blocks)
    parts, merges, num_partials = _split_all(tiles, geometry)
    part_tables, merge_table, block_table = _upload(list(parts.values()), merges, blocks, device)
    return TritonPlan(
        covers_all=sum(view.num_rows for view in views) == num_rows,
        parts=tuple(Parts(size, table) for size, table in zip(parts, part_tables, strict=True)),
        blocks=block_table,
        merges=merge_table,
        merge_pairs=max((merge.num_pairs for merge in merges), default=0),
        partial_o=torch.empty(num_partials, geometry.kv_heads, geometry.v_size, dtype=torch.float32, device=device),
        partial_lse=torch.empty(num_partials, geometry.kv_heads, dtype=torch.float32, device=device),
    )


def _tiles(view: View, table: int, geometry: TritonGeometry) -> Iterable[_Tile]:
    """The tiles of a view, each over the keys that one of its rows sees."""
    per_row = geometry.heads_per_kv
    ahead = view.row_position - view.key_position  # the view's row r is at its key ahead + r
    pairs = view.num_rows * per_row
    tile_pairs = geometry.few_pairs if pairs <= geometry.few_pairs else geometry.many_pairs
    for pair in range(0, pairs, tile_pairs):
        num_pairs = min(tile_pairs, pairs - pair)
        first_seen = ahead + pair // per_row - geometry.window + 1 if geometry.window else 0
        yield _Tile(
            tile_pairs,
            Part(
                table=table,
                start=max(0, first_seen),
                stop=min(view.num_keys, ahead + (pair + num_pairs - 1) // per_row + 1),
                shift=ahead - view.first_row,
                first_pair=view.first_row * per_row + pair,
                num_pairs=num_pairs,
                target=-1,
            ),
        )


def _split_all(tiles: Sequence[_Tile], geometry: TritonGeometry) -> tuple[dict[int, list[Part]], list[Merge], int]:
    """Parts by the size of their tiles, the longest first; what is to be merged; and how many partials that needs."""
    target_keys = _target_keys(sum(tile.num_keys for tile in tiles), geometry)
    parts: dict[int, list[Part]] = {}
    merges: list[Merge] = []
    num_partials = 0
    for tile_pairs, part in tiles:
        listed = parts.setdefault(tile_pairs, [])
        ranges = _split(part.start, part.stop, target_keys, geometry.tile_keys)
        if len(ranges) == 1:
            listed.append(part)
            continue
        merges.append(Merge(part.first_pair, part.num_pairs, num_partials, len(ranges)))
        for start, stop in ranges:
            listed.append(part._replace(start=start, stop=stop, target=num_partials))
            num_partials += part.num_pairs
    for listed in parts.values():
        listed.sort(key=lambda part: part.start - part.stop)
    return parts, merges, num_partials


def _target_keys(num_keys: int, geometry: TritonGeometry) -> int:
    """Keys that one part should have."""
    return max(geometry.least_keys, -(-num_keys * geometry.kv_heads // geometry.num_programs))


def _split(start: int, stop: int, target_keys: int, tile_keys: int) -> list[tuple[int, int]]:
    """Ranges of whole tiles, the last one shorter, about as long as one another and as the target.

    What is a little longer than the target stays whole: two halves would cost a merge and be too short.
    """
    tiles = -(-(stop - start) // tile_keys)
    count = max(1, min(tiles, round((stop - start) / target_keys)))
    edges = [start + tiles * number // count * tile_keys for number in range(count)]
    return list(pairwise([*edges, stop]))


def _upload(
    parts: Sequence[Sequence[Part]], merges: Sequence[Merge], blocks: Sequence[int], device: torch.device
) -> tuple[list[Tensor], Tensor, Tensor]:
    """All of it as int32 tensors, with one copy to the device that the host doesn't wait for.

    Each begins at a multiple of 16 bytes, as 4 or 8 numbers make a row and blocks come last; Triton compiles a kernel
    anew for memory that doesn't.
    """
    numbers = array("i", chain(*chain(*parts), *merges, blocks))
    packed = torch.empty(len(numbers), dtype=torch.int32, pin_memory=device.type == "cuda")
    if numbers:
        packed.copy_(torch.frombuffer(numbers, dtype=torch.int32))
    sizes = [*(len(listed) * 8 for listed in parts), len(merges) * 4, len(blocks)]
    *part_tables, merge_table, block_table = packed.to(device, non_blocking=True).split(sizes)
    return [table.view(-1, 8) for table in part_tables], merge_table.view(-1, 4), block_table
