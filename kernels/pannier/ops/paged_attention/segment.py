"""Consecutive query rows of one sequence, and the stored keys that they may see."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class PagedSegment:
    """Rows at positions `query_position` on; the first `num_keys` tokens of `blocks`, at `first_position` on."""

    blocks: Sequence[int]
    num_keys: int
    first_position: int
    query_position: int
    num_queries: int

    def check(self, number: int) -> None:
        """Raise ValueError when a number can't be; `number` is the segment's own, for the message."""
        if min(self.num_keys, self.first_position, self.query_position, self.num_queries) < 0:
            raise ValueError(f"segment {number} is {self}; none of its numbers may be negative")
        if min(self.blocks, default=0) < 0:
            raise ValueError(f"segment {number} names block {min(self.blocks)}; block numbers are not negative")


class View(NamedTuple):
    """The part of a segment where something is seen: each of its rows sees at least one of its keys.

    Keys start with a block; before the first one that is seen there are less than a block's.
    """

    blocks: Sequence[int]
    first_row: int
    """Among the rows of the batch."""
    num_rows: int
    row_position: int
    num_keys: int
    key_position: int


def visible(segment: PagedSegment, first_row: int, window: int, block_size: int) -> View | None:
    """What is left of a segment without the rows that see nothing and the blocks that nobody sees.

    Both are ranges. Rows before the first key see nothing, nor do those that are a window or more behind the last one.
    """
    start = segment.first_position
    stop = start + segment.num_keys
    row_start = max(segment.query_position, start)
    row_stop = segment.query_position + segment.num_queries
    if window:
        row_stop = min(row_stop, stop - 1 + window)
    if stop == start or row_stop <= row_start:
        return None
    first_block = max(0, row_start - window + 1 - start) // block_size if window else 0
    key_start = start + first_block * block_size
    num_keys = min(stop, row_stop) - key_start
    return View(
        blocks=segment.blocks[first_block : first_block + -(-num_keys // block_size)],
        first_row=first_row + row_start - segment.query_position,
        num_rows=row_stop - row_start,
        row_position=row_start,
        num_keys=num_keys,
        key_position=key_start,
    )
