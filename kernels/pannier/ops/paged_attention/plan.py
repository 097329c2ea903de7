"""From segments to index tensors: which segments are computed together, and where their keys lie.

Segments with as many rows and about as many keys form a bucket, padded to its longest one. Whole tiles are gathered, a
tile being the keys of one block and KV head; of the padding that remains in between, every key is set to zero and
masked, so what was left in a block can't become NaN * 0.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pannier.ops.paged_attention.segment import PagedSegment, View, visible

FREE_PADDING = 64
"""Keys; padding a segment by so few costs less than a bucket of its own."""

MAX_BUCKET_KEYS = 8192
"""Keys in a bucket of several segments, padding included: what was gathered should still be in a cache when it is read.
Measured from 512 to 16384 with keys that no cache holds: in bf16 2048 and up are alike, but one bucket for all rows
needs no copies around it; in fp32 4096 is the best by little."""


@dataclass(frozen=True)
class Geometry:
    """What of a call decides how a batch is computed."""

    window: int
    block_size: int
    kv_heads: int
    heads_per_kv: int


@dataclass(frozen=True)
class Bucket:
    """S segments of R rows each, over L keys each."""

    num_segments: int
    num_rows: int
    rows: Tensor | None
    """int64 [S * R]: which rows of the batch; None when they are all of them in order."""
    num_keys: int
    """L."""
    tiles: Tensor
    """int64 [S * G * blocks]: which rows of the cache seen as [P * G, K * size]."""
    padding: Tensor | None
    """int64: rows of the gathered [S * G * blocks * K, size] that lie before L and hold no key; None if none do."""
    mask: Tensor | None
    """fp32 [S, 1, R * H/G, L]: 0 or, for keys that are not seen, -inf; None when all are seen."""


def make_plan(segments: Sequence[PagedSegment], geometry: Geometry, device: torch.device) -> tuple[Bucket, ...]:
    """Buckets that hold every row that sees anything. Raises ValueError when blocks are missing."""
    views, num_rows = views_of(segments, geometry.window, geometry.block_size)
    return make_buckets(views, geometry, num_rows, device)


def views_of(segments: Sequence[PagedSegment], window: int, block_size: int) -> tuple[list[View], int]:
    """What is seen, and how many rows there are altogether. Raises ValueError when blocks are missing."""
    views: list[View] = []
    first_row = 0
    for number, segment in enumerate(segments):
        check_room(number, segment, block_size)
        view = visible(segment, first_row, window, block_size)
        if view is not None:
            views.append(view)
        first_row += segment.num_queries
    return views, first_row


def existing_views(
    segments: Sequence[PagedSegment], window: int, block_size: int, num_blocks: int
) -> tuple[list[View], int]:
    """The same for memory that is read without a check: IndexError for a block number behind the last one."""
    views, num_rows = views_of(segments, window, block_size)
    for view in views:
        if max(view.blocks) >= num_blocks:
            raise IndexError(f"row {view.first_row} looks at block {max(view.blocks)}; the cache has {num_blocks}")
    return views, num_rows


def make_buckets(views: Sequence[View], geometry: Geometry, num_rows: int, device: torch.device) -> tuple[Bucket, ...]:
    """Buckets of these views, out of `num_rows` in the batch."""
    return tuple(_make_bucket(group, geometry, num_rows, device) for group in _group(views))


def check_room(number: int, segment: PagedSegment, block_size: int) -> None:
    """Raise ValueError when a segment has more keys than its blocks hold."""
    room = len(segment.blocks) * block_size
    if segment.num_keys > room:
        raise ValueError(
            f"num_keys of segment {number} is {segment.num_keys}; its {len(segment.blocks)} blocks hold {room}"
        )


def _group(views: Sequence[View]) -> list[list[View]]:
    """Equal numbers of rows, similar numbers of keys; each group in the order of its rows."""
    groups: list[list[View]] = []
    for view in sorted(views, key=lambda view: (view.num_rows, -view.num_keys)):
        if groups and _fits(view, groups[-1]):
            groups[-1].append(view)
        else:
            groups.append([view])
    return [sorted(group, key=lambda view: view.first_row) for group in groups]


def _fits(view: View, group: Sequence[View]) -> bool:
    longest = group[0].num_keys
    return (
        view.num_rows == group[0].num_rows
        and longest - view.num_keys <= max(FREE_PADDING, longest // 3)
        and longest * (len(group) + 1) <= MAX_BUCKET_KEYS
    )


def _make_bucket(group: Sequence[View], geometry: Geometry, total: int, device: torch.device) -> Bucket:
    num_rows = group[0].num_rows
    index = torch.arange(max(view.num_keys for view in group))
    stored = index < _column(view.num_keys for view in group)  # [S, L]
    mask = _mask(group, index, stored, geometry)
    rows = _column(view.first_row for view in group) + torch.arange(num_rows)
    tiles = _tiles(group, geometry)
    padding = _padding(stored, tiles.shape[2] * geometry.block_size, geometry)
    return Bucket(
        num_segments=len(group),
        num_rows=num_rows,
        rows=None if rows.numel() == total else rows.flatten().to(device),
        num_keys=stored.shape[1],
        tiles=tiles.flatten().to(device),
        padding=None if padding is None else padding.to(device),
        mask=None if mask is None else mask.to(device),
    )


def _column(numbers: Iterable[int]) -> Tensor:
    return torch.tensor(list(numbers)).unsqueeze(1)


def _tiles(group: Sequence[View], geometry: Geometry) -> Tensor:
    """Where in the cache the tiles of the views lie, for each KV head: [S, G, blocks]."""
    width = max(blocks_for(view.num_keys, geometry.block_size) for view in group)
    table = torch.tensor([[*view.blocks[:width], *[0] * (width - len(view.blocks))] for view in group])
    return table.unsqueeze(1) * geometry.kv_heads + torch.arange(geometry.kv_heads).unsqueeze(1)


def _padding(stored: Tensor, room: int, geometry: Geometry) -> Tensor | None:
    """Rows of what was gathered, with `room` keys a segment and head, that are not `stored` [S, L]."""
    if bool(stored.all()):
        return None
    segment, key = (~stored).nonzero(as_tuple=True)
    heads = torch.arange(geometry.kv_heads).unsqueeze(1)
    return ((segment * geometry.kv_heads + heads) * room + key).flatten()


def blocks_for(num_keys: int, block_size: int) -> int:
    """How many blocks hold so many keys."""
    return -(-num_keys // block_size)


def _mask(group: Sequence[View], index: Tensor, stored: Tensor, geometry: Geometry) -> Tensor | None:
    """[S, 1, R * H/G, L]: the heads of one KV head stand beside one another, as rows."""
    ahead = _column(view.row_position - view.key_position for view in group) + torch.arange(group[0].num_rows)
    distance = ahead.unsqueeze(2) - index  # [S, R, L], from key to row
    seen = stored.unsqueeze(1) & (distance >= 0)
    if geometry.window:
        seen &= distance < geometry.window
    if bool(seen.all()):
        return None
    segments, rows, length = seen.shape
    mask = torch.where(seen, 0.0, float("-inf")).unsqueeze(2)
    return mask.expand(segments, rows, geometry.heads_per_kv, length).reshape(segments, 1, -1, length)
