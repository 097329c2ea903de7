"""Simulated blocks and workers, which know nothing but the steps that they are sent.

A worker writes tokens into blocks, reads the past back from them, and draws the next token as a hash of the whole
history; so a token that is lost, doubled or out of its place, a stale block, and a `Previous` that points elsewhere all
change the text. Cells carry their owner (the first token of each prompt is the sequence's number), and blocks an epoch
that ends when they are released, at which their cells are poisoned: reading freed blocks and writing late are seen as
they happen.
"""

import zlib
from array import array
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from pannier.scheduler import UNRESOLVED, BlockPool, Request, Step
from pannier.wire.messages import Drawn, Segment

VOCABULARY = 40
BLOCK_SIZE = 4
MAX_MODEL_LEN = 30
EOS = frozenset({7, 8})


def draw(history: list[int], seed: int) -> int:
    """The model: the next token is a hash of all tokens before it."""
    return zlib.crc32(array("i", [*history, seed]).tobytes()) % VOCABULARY


def undisturbed(request: Request) -> tuple[list[int], str]:
    """Output and finish reason of the request when nothing else happens."""
    history = list(request.prompt)
    limit = min(request.max_tokens, MAX_MODEL_LEN - len(history))
    for _ in range(limit):
        history.append(draw(history, request.seed))
        if history[-1] in request.eos_tokens:
            return history[len(request.prompt) :], "stop"
    return history[len(request.prompt) :], "length"


@dataclass(frozen=True)
class Cell:
    """What stands for the K and V of one token."""

    owner: int
    position: int
    token: int


class SimulatedGroup:
    """The blocks of one group: cells by slot, None when poisoned, and an epoch for each block."""

    def __init__(self, num_blocks: int) -> None:
        self.cells: list[Cell | None] = [None] * (num_blocks * BLOCK_SIZE)
        self.epochs = [0] * num_blocks
        self.was_used = [False] * num_blocks

    def look(self, pool: BlockPool) -> None:
        """See which blocks were released since the last look, and end their epoch."""
        for block, was_used in enumerate(self.was_used):
            self.was_used[block] = pool.is_used(block)
            if was_used and not pool.is_used(block):
                self.epochs[block] += 1
                self.cells[block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE] = [None] * BLOCK_SIZE


@dataclass(eq=False)
class Flight:
    """A step on its way: the epochs of its blocks when it was planned, and what it drew once it has run."""

    step: Step
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
        histories: dict[int, list[int]] = {}
        for segment, table in list(flight.tables())[:num_segments]:
            first, count = segment.query_start, segment.num_queries
            tokens = rows[first : first + count]
            past = self._past(groups[segment.group], segment, table)
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
        assert segment.first_position == 0
        assert segment.query_position == segment.num_stored
        past = []
        for position in range(segment.num_stored):
            cell = group.cells[table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE]
            assert cell is not None, "a poisoned cell was read"
            past.append(cell.token)
            assert (cell.owner, cell.position) == (past[0], position), "a cell of another sequence or position was read"
        return past

    def _store(
        self, flight: Flight, group: SimulatedGroup, segment: Segment, table: list[int], tokens: list[int]
    ) -> None:
        for position in range(segment.query_position, len(tokens)):
            block = table[position // BLOCK_SIZE]
            assert group.epochs[block] == flight.epochs[segment.group, block], "a late write: the block was released"
            assert group.was_used[block], "a free block was written"
            slot = block * BLOCK_SIZE + position % BLOCK_SIZE
            before, after = group.cells[slot], Cell(tokens[0], position, tokens[position])
            assert before in (None, after), "a cell was overwritten with something else"
            group.cells[slot] = after

    def _draws(self, step: Step, histories: dict[int, list[int]]) -> list[Drawn]:
        drawn = []
        for sample in step.samples:
            history = histories[sample.row]
            assert history[0] == sample.sequence
            assert len(history) == sample.position
            drawn.append(Drawn(sample.sequence, draw(history, sample.seed), None, ()))
        return drawn
