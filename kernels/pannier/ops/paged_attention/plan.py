"""From segments to index tensors: which segments are computed together, and where their keys lie.

Segments with as many rows and about as many keys form a bucket, padded to its longest one. Padding repeats a key that
is stored, and is masked: nothing else of a block is read, so that what was left there can't become NaN * 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from pannier.ops.paged_attention.segment import PagedSegment, View, visible

MAX_PADDING = 1.5
"""A bucket's longest segment has at most this many times the keys of its shortest."""

MAX_BUCKET_TOKENS = 1 << 16
"""Padded keys in a bucket of several segments: bounds the memory that gathered keys and values take."""


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
    keys: Tensor
    """int64 [S * G * L]: which rows of the cache seen as [P * G * K, size]."""
    mask: Tensor | None
    """fp32 [S, 1, R * H/G, L]: 0 or, for keys that are not seen, -inf; None when all are seen."""


def make_plan(segments: Sequence[PagedSegment], geometry: Geometry, device: torch.device) -> tuple[Bucket, ...]:
    """Buckets that hold every row that sees anything. Raises ValueError when blocks are missing."""
    _check_room(segments, geometry.block_size)
    counts = [segment.num_queries for segment in segments]
    total = sum(counts)
    starts = [0, *accumulate(counts)]
    views = [
        view
        for segment, start in zip(segments, starts, strict=False)
        if (view := visible(segment, start, geometry.window)) is not None
    ]
    return tuple(_make_bucket(group, geometry, total, device) for group in _group(views))


def _check_room(segments: Sequence[PagedSegment], block_size: int) -> None:
    for number, segment in enumerate(segments):
        room = len(segment.blocks) * block_size
        if segment.num_keys > room:
            raise ValueError(
                f"num_keys of segment {number} is {segment.num_keys}; its {len(segment.blocks)} blocks hold {room}"
            )


def _group(views: Sequence[View]) -> list[list[View]]:
    """Equal numbers of rows, similar numbers of keys; each group in the order of its rows."""
    groups: list[list[View]] = []
    longest = 0
    for view in sorted(views, key=lambda view: (view.num_rows, -view.num_keys)):
        group = groups[-1] if groups else []
        fits = (
            group
            and view.num_rows == group[0].num_rows
            and view.num_keys * MAX_PADDING >= longest
            and (len(group) + 1) * longest <= MAX_BUCKET_TOKENS
        )
        if fits:
            group.append(view)
        else:
            groups.append([view])
            longest = view.num_keys
    return [sorted(group, key=lambda view: view.first_row) for group in groups]


def _make_bucket(group: Sequence[View], geometry: Geometry, total: int, device: torch.device) -> Bucket:
    num_rows = group[0].num_rows
    index = torch.arange(max(view.num_keys for view in group))
    num_keys = torch.tensor([view.num_keys for view in group]).unsqueeze(1)
    stored = index < num_keys  # [S, L]
    mask = _mask(group, index, stored, geometry)
    rows = torch.tensor([view.first_row for view in group]).unsqueeze(1) + torch.arange(num_rows)
    return Bucket(
        num_segments=len(group),
        num_rows=num_rows,
        rows=None if len(group) * num_rows == total else rows.flatten().to(device),
        keys=_key_rows(group, torch.where(stored, index, 0), geometry).to(device),
        mask=None if mask is None else mask.to(device),
    )


def _key_rows(group: Sequence[View], index: Tensor, geometry: Geometry) -> Tensor:
    """Where in the cache the keys `index` [S, L] of the views lie, for each KV head: [S * G * L]."""
    width = max(len(view.blocks) for view in group)
    table = torch.tensor([[*view.blocks, *[0] * (width - len(view.blocks))] for view in group])
    token = index + torch.tensor([view.first_key for view in group]).unsqueeze(1)
    block = table.gather(1, token // geometry.block_size).unsqueeze(1)  # [S, 1, L]
    head = torch.arange(geometry.kv_heads).unsqueeze(1)  # [G, 1]
    row = (block * geometry.kv_heads + head) * geometry.block_size + (token % geometry.block_size).unsqueeze(1)
    return row.flatten()


def _mask(group: Sequence[View], index: Tensor, stored: Tensor, geometry: Geometry) -> Tensor | None:
    """[S, 1, R * H/G, L]: the heads of one KV head stand beside one another, as rows."""
    key = torch.tensor([view.key_position for view in group]).view(-1, 1, 1) + index  # [S, 1, L]
    row = torch.tensor([view.row_position for view in group]).view(-1, 1, 1)
    row = row + torch.arange(group[0].num_rows).unsqueeze(1)  # [S, R, 1]
    seen = stored.unsqueeze(1) & (key <= row)
    if geometry.window:
        seen &= key > row - geometry.window
    if bool(seen.all()):
        return None
    mask = torch.zeros(seen.shape).masked_fill_(~seen, float("-inf"))
    segments, rows, length = seen.shape
    heads = geometry.heads_per_kv
    folded = mask.unsqueeze(2).expand(segments, rows, heads, length)
    return folded.reshape(segments, 1, rows * heads, length)
