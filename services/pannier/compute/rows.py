"""Which rows of a step concern which group, and what its attention workers are told about them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import msgspec
import torch

from pannier.wire import messages as m

Rows = slice | torch.Tensor
"""Row indices: a slice where they are consecutive, so that no row is gathered."""


@dataclass(frozen=True)
class GroupRows:
    """One group's share of a step.

    Stored rows count over its segments that store, query rows over those that are answered, in the order listed.
    """

    group: int
    segments: tuple[m.Segment, ...]
    """Renumbered for `BeginStep`: blocks within `block_tables`, rows within this group's own."""
    block_tables: tuple[int, ...]
    stored: Rows
    queries: Rows
    num_stored: int
    num_queries: int
    num_answered_stored: int
    """Stored rows that are query rows too: they come first and travel with the request."""
    num_alone: int
    """Query rows at the front that nothing else will be merged with (sinks aside)."""


def positions_of(segments: Sequence[m.Segment]) -> list[int]:
    """Absolute positions of a step's rows."""
    return [s.query_position + i for s in segments if s.stores for i in range(s.num_queries)]


def chunk_lengths(segments: Sequence[m.Segment]) -> list[int]:
    """Lengths of the chunks; their rows are the last ones of the step."""
    return [s.num_queries for s in segments if s.kind is m.SegmentKind.CHUNK]


def group_rows(step: m.Step, block_tables: Sequence[int]) -> list[GroupRows]:
    """Split a step by group, in the order in which groups first appear."""
    groups = dict.fromkeys(segment.group for segment in step.segments)
    split_rows = {s.query_start for s in step.segments if s.kind is m.SegmentKind.READ}
    return [
        _rows_of(group, [s for s in step.segments if s.group == group], block_tables, split_rows) for group in groups
    ]


def _rows_of(group: int, segments: list[m.Segment], block_tables: Sequence[int], split_rows: set[int]) -> GroupRows:
    answered = [s for s in segments if s.answers]
    alone = takewhile(lambda s: s.kind is m.SegmentKind.DECODE and s.query_start not in split_rows, answered)
    own: list[m.Segment] = []
    tables: list[int] = []
    row = 0
    for segment in segments:
        blocks = block_tables[segment.first_block : segment.first_block + segment.num_blocks]
        own.append(msgspec.structs.replace(segment, first_block=len(tables), query_start=row))
        tables.extend(blocks)
        row += segment.num_queries
    return GroupRows(
        group=group,
        segments=tuple(own),
        block_tables=tuple(tables),
        stored=_consecutive([s for s in segments if s.stores]),
        queries=_consecutive(answered),
        num_stored=sum(s.num_queries for s in segments if s.stores),
        num_queries=sum(s.num_queries for s in answered),
        num_answered_stored=sum(s.num_queries for s in answered if s.stores),
        num_alone=len(list(alone)),
    )


def _consecutive(segments: Sequence[m.Segment]) -> Rows:
    rows = [row for s in segments for row in range(s.query_start, s.query_start + s.num_queries)]
    if not rows:
        return slice(0, 0)
    if rows == list(range(rows[0], rows[0] + len(rows))):
        return slice(rows[0], rows[0] + len(rows))
    return torch.tensor(rows)
