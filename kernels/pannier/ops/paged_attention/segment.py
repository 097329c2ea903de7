"""Consecutive query rows of one sequence, and the stored keys that they may see."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PagedSegment:
    """Rows at positions `query_position` on; the first `num_keys` tokens of `blocks`, at `first_position` on."""

    blocks: Sequence[int]
    num_keys: int
    first_position: int
    query_position: int
    num_queries: int

    def check(self, number: int) -> None:
        """Raise ValueError when a number can't be; `number` is the segment's own, for the message."""
        for name in ("num_keys", "first_position", "query_position", "num_queries"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} of segment {number} is {getattr(self, name)}; it must not be negative")
        if len(self.blocks) and min(self.blocks) < 0:
            raise ValueError(f"segment {number} names block {min(self.blocks)}; block numbers are not negative")


@dataclass(frozen=True)
class View:
    """The part of a segment where something is seen: each of these rows sees at least one of these keys."""

    blocks: Sequence[int]
    first_row: int
    """Among the rows of the batch."""
    num_rows: int
    row_position: int
    first_key: int
    """Index among the stored tokens of `blocks`."""
    num_keys: int
    key_position: int


def visible(segment: PagedSegment, first_row: int, window: int) -> View | None:
    """What is left of a segment without the rows that see nothing and the keys that nobody sees.

    Both are ranges. Rows before the first key see nothing, nor do those that are a window or more behind the last one.
    """
    last_key = segment.first_position + segment.num_keys - 1
    row_start = max(segment.query_position, segment.first_position)
    row_stop = segment.query_position + segment.num_queries
    if window:
        row_stop = min(row_stop, last_key + window)
    if segment.num_keys == 0 or row_stop <= row_start:
        return None
    key_start = max(segment.first_position, row_start - window + 1) if window else segment.first_position
    key_stop = min(last_key + 1, row_stop)
    return View(
        blocks=segment.blocks,
        first_row=first_row + row_start - segment.query_position,
        num_rows=row_stop - row_start,
        row_position=row_start,
        first_key=key_start - segment.first_position,
        num_keys=key_stop - key_start,
        key_position=key_start,
    )
