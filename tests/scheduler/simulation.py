"""Simulated blocks and workers, which know nothing but the steps that they are sent.

A worker writes tokens into blocks, reads the past back from them, and draws the next token as a hash of the whole
history; so a token that is lost, doubled or out of its place, a stale block, a block found by the wrong content, and a
`Previous` that points elsewhere all change the text. Blocks have an epoch that ends when they become free or are handed
out anew, at which their cells are poisoned: reading freed blocks and writing late are seen as they happen.
"""

import zlib
from array import array
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from pannier.scheduler import UNRESOLVED, BlockPool, Request, Step
from pannier.wire.messages import Drawn, Segment

VOCABULARY = 40
BLOCK_SIZE = 4
MAX_MODEL_LEN = 30
EOS = frozenset({7, 8})


def draw(history: list[int], seed: int, index: int) -> int:
    """The model: the next token is a hash of all tokens before it."""
    return zlib.crc32(array("i", [*history, seed, index]).tobytes()) % VOCABULARY


def undisturbed(request: Request, index: int) -> tuple[list[int], str]:
    """Output and finish reason of one of the request's samples when nothing else happens."""
    history = list(request.prompt)
    limit = min(request.max_tokens, MAX_MODEL_LEN - len(history))
    for _ in range(limit):
        history.append(draw(history, request.seed, index))
        if history[-1] in request.stop_tokens:
            return history[len(request.prompt) :], "stop"
    return history[len(request.prompt) :], "length"


@dataclass(frozen=True)
class Cell:
    """What stands for the K and V of one token."""

    position: int
    token: int
    is_copy: bool = field(default=False, compare=False)
    """Of a copied block: what lies behind the prompt is another sample's, and written over."""


class SimulatedGroup:
    """The blocks of one group: cells by slot, None when poisoned, and an epoch for each block."""

    def __init__(self, pool: BlockPool) -> None:
        self.cells: list[Cell | None] = [None] * (pool.total * BLOCK_SIZE)
        self.epochs = [0] * pool.total
        self.pool = pool
        self._is_poisoned = [True] * pool.total
        take = pool._take

        def take_and_poison() -> int:
            block = take()
            self._poison(block)
            return block

        pool._take = take_and_poison  # type: ignore[method-assign]

    def look(self) -> None:
        """Poison the blocks that have become free."""
        for block in self.pool._free:
            if not self._is_poisoned[block]:
                self._poison(block)

    def _poison(self, block: int) -> None:
        self.epochs[block] += 1
        self._is_poisoned[block] = True
        self.cells[block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE] = [None] * BLOCK_SIZE

    def write(self, slot: int, cell: Cell) -> None:
        """What stands in a slot may be written again, and not something else."""
        before = self.cells[slot]
        assert before is None or before.is_copy or before == cell, "a cell was overwritten with something else"
        assert self.pool.is_used(slot // BLOCK_SIZE), "a free block was written"
        self.cells[slot] = cell
        self._is_poisoned[slot // BLOCK_SIZE] = False

    def copy(self, source: int, target: int) -> None:
        """Copy a block."""
        cells = self.cells[source * BLOCK_SIZE : (source + 1) * BLOCK_SIZE]
        copies = [cell and replace(cell, is_copy=True) for cell in cells]
        self.cells[target * BLOCK_SIZE : (target + 1) * BLOCK_SIZE] = copies
        self._is_poisoned[target] = False


@dataclass(eq=False)
class Flight:
    """A step on its way: the epochs of its blocks when it was planned, and what it drew once it has run."""

    step: Step
    sequences: list[int]
    """Whose the segments are that store."""
    epochs: dict[tuple[int, int], int]
    drawn: list[Drawn] | None = None

    def tables(self) -> Iterator[tuple[Segment, list[int]]]:
        """Each segment with its block table."""
        for segment in self.step.segments:
            first = segment.first_block
            yield segment, list(self.step.blocks[first : first + segment.num_blocks])


@dataclass
class SimulatedWorker:
    """One lane's device side. It remembers what its last step drew, for the `Previous` of the next."""

    sent: deque[Flight] = field(default_factory=deque)
    last_step: int = -1
    last_drawn: list[Drawn] = field(default_factory=list)

    def run(self, flight: Flight, groups: dict[int, SimulatedGroup], num_segments: int) -> None:
        """Run the step, or only its first segments, as a worker does that is lost in the middle."""
        rows = self._rows(flight.step)
        for copy in flight.step.copies:
            groups[copy.group].copy(copy.source, copy.target)
        histories: dict[int, list[int]] = {}
        pasts: dict[int, list[int]] = defaultdict(list)  # first row -> tokens of the parts read so far
        for segment, table in list(flight.tables())[:num_segments]:
            first, count = segment.query_start, segment.num_queries
            tokens, past = rows[first : first + count], pasts[first]
            assert segment.first_position == len(past), "parts follow one another"
            past += self._past(groups[segment.group], segment, table)
            if segment.stores:
                self._store(flight, groups[segment.group], segment, table, past + tokens)
                histories |= {first + row: past + tokens[: row + 1] for row in range(count)}
        if num_segments >= len(flight.step.segments):
            flight.drawn = self._draws(flight.step, histories)
            self.last_step, self.last_drawn = flight.step.step, flight.drawn

    def _rows(self, step: Step) -> list[int]:
        tokens = list(step.token_ids)
        for previous in step.previous:
            assert previous.step == self.last_step, "PREVIOUS is of the lane's preceding step"
            assert tokens[previous.row] == UNRESOLVED
            tokens[previous.row] = self.last_drawn[previous.sample].token
        assert UNRESOLVED not in tokens
        return tokens

    def _past(self, group: SimulatedGroup, segment: Segment, table: list[int]) -> list[int]:
        if segment.stores:
            assert segment.query_position == segment.first_position + segment.num_stored
        past = []
        for place in range(segment.num_stored):
            cell = group.cells[table[place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE]
            assert cell is not None, "a poisoned cell was read"
            past.append(cell.token)
            assert cell.position == segment.first_position + place, "a cell of another position was read"
        return past

    def _store(
        self, flight: Flight, group: SimulatedGroup, segment: Segment, table: list[int], tokens: list[int]
    ) -> None:
        for position in range(segment.query_position, len(tokens)):
            block = table[(position - segment.first_position) // BLOCK_SIZE]
            assert group.epochs[block] == flight.epochs[segment.group, block], "a late write: the block was released"
            group.write(block * BLOCK_SIZE + position % BLOCK_SIZE, Cell(position, tokens[position]))

    def _draws(self, step: Step, histories: dict[int, list[int]]) -> list[Drawn]:
        drawn = []
        for sample in step.samples:
            history = histories[sample.row]
            assert len(history) == sample.position
            drawn.append(Drawn(sample.sequence, draw(history, sample.seed, sample.index), None, ()))
        return drawn
