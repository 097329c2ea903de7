"""One forward pass over one lane's rows, as the scheduler hands it out."""

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from typing import NamedTuple

from pannier.scheduler.blocks import Ints, blocks_for
from pannier.scheduler.sequence import Sequence
from pannier.wire.messages import BlockCopy, Previous, Sample, SamplerState, Score, Segment, SegmentKind

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
    scores: tuple[Score, ...] = ()
    scored_tokens: Ints = field(default_factory=lambda: array("i"))
    """int32 [S]: what the scores score."""
    masks: tuple[bytes, ...] = ()
    """Of each mask ceil(V / 32) words."""
    copies: tuple[BlockCopy, ...] = ()
    states: tuple[SamplerState, ...] = ()


class Rows(NamedTuple):
    """One sequence's rows in a step: its next `num_tokens` tokens.

    It draws `num_draws` tokens behind the last: none while something known lies behind them, and one for each sample
    of the request where the prompt ends.
    """

    sequence: Sequence
    num_tokens: int
    num_draws: int


@dataclass(frozen=True, slots=True)
class Planned:
    """A step that is planned and not committed, with the sequences behind its rows: decode rows first, then chunks."""

    step: Step
    decodes: List[Sequence]
    """One row and one draw each."""
    chunks: List[Rows]
    groups: frozenset[int]

    @property
    def rows(self) -> list[Rows]:
        """All of them, in the order of the step's segments."""
        return [*(Rows(sequence, 1, 1) for sequence in self.decodes), *self.chunks]


@dataclass(slots=True)
class Draft:
    """A step being written, one sequence after the other."""

    step: int
    lane: int
    block_size: int
    decodes: list[Sequence] = field(default_factory=list)
    chunks: list[Rows] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    token_ids: Ints = field(default_factory=lambda: array("i"))
    blocks: Ints = field(default_factory=lambda: array("i"))
    previous: list[Previous] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)
    scored_tokens: Ints = field(default_factory=lambda: array("i"))
    masks: list[bytes] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    states: list[SamplerState] = field(default_factory=list)
    groups: set[int] = field(default_factory=set)

    def add_ready(self, sequences: Iterable[Sequence], newest: int) -> tuple[list[Sequence], list[Sequence]]:
        """Write a row and a draw for each that has one new token and room for it, and count them as planned.

        `newest` is the lane's newest planned step. Returns the others that are ready: those that need a block first or
        are spread over groups, and those with more than one token to compute. This runs for every token of the engine,
        so it is one loop that looks at each sequence once.
        """
        growing: list[Sequence] = []
        prompts: list[Sequence] = []
        for sequence in sequences:
            if not sequence.is_ready_behind(newest):
                continue
            stored = sequence.num_planned
            if sequence.length - stored > 1 or stored < sequence.num_prompt:
                prompts.append(sequence)
            elif sequence.parts or stored == len(sequence.blocks) * self.block_size:
                growing.append(sequence)
            else:
                self.add_decode(sequence)
        return growing, prompts

    def add_decode(self, sequence: Sequence) -> None:
        """Write one row and one draw, and count them as planned."""
        self.decodes.append(sequence)
        if sequence.has_rules or sequence.copied is not None or sequence.parts:
            self._add_rows(SegmentKind.DECODE, sequence, 1, 1)
            return
        stored, group, table = sequence.num_planned, sequence.group, sequence.blocks
        assert group is not None
        self.groups.add(group)
        token_ids, blocks, samples = self.token_ids, self.blocks, self.samples
        row, num_blocks = len(token_ids), stored // self.block_size + 1
        segment = Segment(SegmentKind.DECODE, group, 0, len(blocks), num_blocks, stored, stored, row, 1)
        self.segments.append(segment)  # by position, as names would take twice as long
        blocks.extend(table if len(table) == num_blocks else table[:num_blocks])
        if sequence.num_promised:
            token_ids.append(UNRESOLVED)
            self.previous.append(Previous(row, sequence.promised_step, sequence.promised_sample))
        else:
            token_ids.append(sequence.tokens[stored])
        sequence.num_planned = position = stored + 1
        sequence.num_steps += 1
        sequence.promise(self.step, len(samples))
        number, index, top = sequence.number, sequence.index, sequence.top_logprobs
        samples.append(Sample(row, number, position, index, sequence.seed, sequence.filters, top, 0, -1))

    def add_chunk(self, rows: Rows) -> None:
        """Write the rows of a chunk, which stays one if it is a single row, and count them as planned."""
        self.chunks.append(rows)
        self._add_rows(SegmentKind.CHUNK, *rows)

    def _add_rows(self, kind: SegmentKind, sequence: Sequence, num_tokens: int, num_draws: int) -> None:
        if sequence.copied is not None:
            self._add_copy(sequence)
        self._add_segments(kind, sequence, num_tokens)
        self._add_tokens(sequence, num_tokens)
        if sequence.request.prompt_logprobs is not None:
            self._add_scores(sequence, num_tokens)
        sequence.plan(num_tokens)
        if num_draws:
            self._add_samples(sequence, num_draws)

    def _add_copy(self, sequence: Sequence) -> None:
        """The block of its first row is to be a copy: until that row has committed, each step with it copies again."""
        assert sequence.group is not None and sequence.copied is not None  # noqa: PT018
        if sequence.num_planned == sequence.num_stored:
            target = sequence.blocks[sequence.num_stored // self.block_size]
            self.copies.append(BlockCopy(sequence.group, sequence.copied, target))

    def _add_segments(self, kind: SegmentKind, sequence: Sequence, num_tokens: int) -> None:
        """The part of its blocks in which the rows are stored; before it those that they only read."""
        stored = sequence.num_planned
        for group, start, stop in sequence.ranges:
            first_position = start * self.block_size
            last_position = stop * self.block_size
            if stored >= last_position:
                self._add_segment(sequence, SegmentKind.READ, group, range(start, stop), num_tokens)
            elif stored >= first_position:
                needed = blocks_for(stored + num_tokens, self.block_size)
                self._add_segment(sequence, kind, group, range(start, needed), num_tokens)

    def _add_segment(self, sequence: Sequence, kind: SegmentKind, group: int, blocks: range, num_tokens: int) -> None:
        stored, first_position = sequence.num_planned, blocks.start * self.block_size
        self.segments.append(
            Segment(
                kind=kind,
                group=group,
                first_position=first_position,
                first_block=len(self.blocks),
                num_blocks=len(blocks),
                num_stored=min(stored - first_position, len(blocks) * self.block_size),
                query_position=stored,
                query_start=len(self.token_ids),
                num_queries=num_tokens,
            )
        )
        self.blocks.extend(sequence.blocks[blocks.start : blocks.stop])
        self.groups.add(group)

    def _add_tokens(self, sequence: Sequence, num_tokens: int) -> None:
        first = sequence.num_planned
        if first < len(sequence.tokens):
            self.token_ids.extend(sequence.tokens[first : first + num_tokens])
        else:
            self.previous.append(Previous(len(self.token_ids), sequence.promised_step, sequence.promised_sample))
            self.token_ids.append(UNRESOLVED)

    def _add_scores(self, sequence: Sequence, num_tokens: int) -> None:
        """Of the prompt's tokens one behind these rows, those that no step scores yet."""
        first = sequence.num_planned
        start = max(sequence.num_scored, min(first, sequence.num_prompt - 1)) + 1
        stop = min(first + num_tokens, sequence.num_prompt - 1) + 1
        if start >= stop:
            return
        row = len(self.token_ids) - num_tokens + start - 1 - first
        top = sequence.request.prompt_logprobs
        assert top is not None
        self.scores.append(Score(sequence.number, row, stop - start, start, len(self.scored_tokens), top))
        self.scored_tokens.extend(sequence.tokens[start:stop])

    def _add_samples(self, sequence: Sequence, num_draws: int) -> None:
        """Behind the last row that was written one draw, or one for each sample of the request."""
        request, samples = sequence.request, self.samples
        sequence.promise(self.step, len(samples))
        mask = -1
        if sequence.mask is not None:
            mask = len(self.masks)
            self.masks.append(sequence.mask)
        version = 0 if request.rules is None else sequence.length - sequence.num_prompt
        numbers = (sequence.number,) if num_draws == 1 else request.sequences
        if version and sequence.told_at is None:
            self._add_states(sequence, numbers)
        row, position, index = len(self.token_ids) - 1, sequence.num_planned, sequence.index
        for number in numbers:
            samples.append(
                Sample(
                    row, number, position, index, request.seed, request.filters, sequence.top_logprobs, version, mask
                )
            )
            index += 1

    def _add_states(self, sequence: Sequence, numbers: Iterable[int]) -> None:
        self.states += [state_of(sequence, number) for number in numbers]
        sequence.told_at = self.step

    def finish(self) -> Planned:
        """The step as it is sent, and whose rows it has."""
        step = Step(
            step=self.step,
            lane=self.lane,
            segments=tuple(self.segments),
            token_ids=self.token_ids,
            blocks=self.blocks,
            previous=tuple(self.previous),
            samples=tuple(self.samples),
            scores=tuple(self.scores),
            scored_tokens=self.scored_tokens,
            masks=tuple(self.masks),
            copies=tuple(self.copies),
            states=tuple(self.states),
        )
        return Planned(step, self.decodes, self.chunks, frozenset(self.groups))


def state_of(sequence: Sequence, number: int) -> SamplerState:
    """What draws for `number`, the sequence or another sample of its request, need of the past.

    Of the prompt, which may be long, that is nothing but which tokens it has, and only where repetition is penalised.
    """
    rules = sequence.request.rules
    assert rules is not None, f"draws of sequence {number} need no state"
    prompt = tuple(sorted(set(sequence.request.prompt))) if rules.penalties.repetition != 1 else ()
    return SamplerState(number, rules, prompt, tuple(sequence.tokens[sequence.num_prompt :]))
