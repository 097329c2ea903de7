"""One forward pass over one lane's rows, as the scheduler hands it out."""

from array import array
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from typing import NamedTuple

from pannier.scheduler.blocks import Ints, blocks_for
from pannier.scheduler.sequence import Promise, Sequence
from pannier.wire.messages import BlockCopy, Previous, Sample, Segment, SegmentKind

UNRESOLVED = -1
"""Stands for the token of a row in `previous`: no legal id, so a row that was never resolved can't pass for one."""


class Unplanned(ValueError):
    """What is said of a step fits none that is planned."""


@dataclass(frozen=True, slots=True)
class Step:
    """What the wire's `Step` says, before it is given a life and a session."""

    step: int
    lane: int
    segments: tuple[Segment, ...]
    token_ids: Ints
    """int32 [T]; `UNRESOLVED` where `previous` names the row."""
    blocks: Ints
    """int32 [N]: the block tables that the segments point into."""
    previous: tuple[Previous, ...]
    samples: tuple[Sample, ...]
    copies: tuple[BlockCopy, ...] = ()


class Rows(NamedTuple):
    """One sequence's rows in a step: its next `num_tokens` tokens. It `draws` when nothing known lies behind them."""

    sequence: Sequence
    num_tokens: int
    draws: bool


@dataclass(frozen=True, slots=True)
class Planned:
    """A step that is planned and not committed, with the sequences behind its rows."""

    step: Step
    rows: List[Rows]
    groups: frozenset[int]


@dataclass(slots=True)
class Draft:
    """A step being written, one sequence after the other."""

    step: int
    lane: int
    block_size: int
    segments: list[Segment] = field(default_factory=list)
    token_ids: Ints = field(default_factory=lambda: array("i"))
    blocks: Ints = field(default_factory=lambda: array("i"))
    previous: list[Previous] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)

    def add(self, rows: Rows) -> None:
        """Write the rows and count them as planned."""
        self._add_segment(rows)
        self._add_tokens(rows)
        promise = self._add_sample(rows) if rows.draws else None
        rows.sequence.plan(rows.num_tokens, promise)

    def _add_segment(self, rows: Rows) -> None:
        sequence = rows.sequence
        assert sequence.group is not None
        num_blocks = blocks_for(sequence.num_planned + rows.num_tokens, self.block_size)
        self.segments.append(
            Segment(
                kind=SegmentKind.DECODE if sequence.is_decoding else SegmentKind.CHUNK,
                group=sequence.group,
                first_position=0,
                first_block=len(self.blocks),
                num_blocks=num_blocks,
                num_stored=sequence.num_planned,
                query_position=sequence.num_planned,
                query_start=len(self.token_ids),
                num_queries=rows.num_tokens,
            )
        )
        self.blocks.extend(sequence.blocks[:num_blocks])

    def _add_tokens(self, rows: Rows) -> None:
        sequence, first = rows.sequence, rows.sequence.num_planned
        if first < len(sequence.tokens):
            self.token_ids.extend(sequence.tokens[first : first + rows.num_tokens])
        else:
            promise = sequence.promised[-1]
            self.previous.append(Previous(row=len(self.token_ids), step=promise.step, sample=promise.sample))
            self.token_ids.append(UNRESOLVED)

    def _add_sample(self, rows: Rows) -> Promise:
        sequence, request = rows.sequence, rows.sequence.request
        self.samples.append(
            Sample(
                row=len(self.token_ids) - 1,
                sequence=sequence.number,
                position=sequence.num_planned + rows.num_tokens,
                temperature=request.temperature,
                seed=request.seed,
                top_logprobs=-1 if request.logprobs is None else request.logprobs,
                state_version=0,
            )
        )
        return Promise(self.step, len(self.samples) - 1)

    def finish(self) -> Step:
        """The step as it is sent."""
        return Step(
            step=self.step,
            lane=self.lane,
            segments=tuple(self.segments),
            token_ids=self.token_ids,
            blocks=self.blocks,
            previous=tuple(self.previous),
            samples=tuple(self.samples),
        )
