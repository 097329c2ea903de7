"""A request on its way through the engine. Only the scheduler changes it."""

from array import array
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple, Protocol

import msgspec

from pannier.scheduler.blocks import Ints
from pannier.scheduler.content import Contents
from pannier.wire.messages import Drawn, Filters, SamplerRules, TokenLogprob


class Rejected(Exception):
    """The request can't be taken. `code` and `param` as in the wire's `Failed`."""

    def __init__(self, code: str, param: str | None, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.param = param
        self.reason = reason


class Constraint(Protocol):
    """Says what tokens may come next (structured output)."""

    def allowed(self, outputs: Ints) -> bytes:
        """The mask behind these output tokens: token t is bit t % 8 of byte t // 8, whole 32-bit words.

        Raises `Rejected` where nothing can come next, not even an end.
        """


GREEDY = Filters()


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What the gateway asks for, already checked and resolved."""

    sequences: tuple[int, ...]
    """One number for each sample of the prompt, each used once."""
    prompt: Ints
    max_tokens: int
    filters: Filters = GREEDY
    rules: SamplerRules | None = None
    """None: its draws need nothing of the past."""
    seed: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop_tokens: frozenset[int] = frozenset()
    """Tokens that end an output, once it has the `min_tokens` of the rules."""
    constraint: Constraint | None = None
    step_by_step: bool = False
    """Each token must be committed before the next is planned (stop strings: the gateway may finish it at any one)."""
    priority: int = 0
    """Smaller goes first, under the priority policy."""
    deadline: float = inf
    """When to give up, on the clock of whoever calls `Scheduler.expire`."""
    salt: str = ""
    """Prefixes are shared among requests of one salt."""

    def mask(self, outputs: Ints) -> bytes | None:
        """What may come behind these output tokens; None: anything. Raises `Rejected` as its constraint does."""
        return None if self.constraint is None else self.constraint.allowed(outputs)


class Output(msgspec.Struct, frozen=True, gc=False):
    """What a committed step, or a loss, means to one sequence."""

    sequence: int
    drawn: Drawn | None
    finish_reason: str | None
    """stop, length or error; None while it goes on."""
    reason: str | None = None
    """One sentence when the finish reason is error."""
    scored: tuple[TokenLogprob, ...] = ()
    """The next tokens of the prompt, from its second on, where the request wants them scored."""
    num_cached: int = 0
    """Tokens of the prompt whose K and V were there already."""


class Part(NamedTuple):
    """From block `start` on a sequence's blocks are those of another group."""

    group: int
    start: int


@dataclass(eq=False, slots=True, kw_only=True)
class Sequence:
    """Tokens, blocks and progress of one sample of a request.

    Its tokens, from the certain to the promised:

    ===========  ==================================================================
    num_stored   K and V written by committed steps
    num_planned  the same once the planned steps have committed
    len(tokens)  prompt and committed outputs
    length       with the outputs that planned steps will draw (`num_promised`)
    ===========  ==================================================================

    The newest promised token is what sample `promised_sample` of step `promised_step` will draw.

    It waits (without lane and group), runs (with a group, and a lane unless its lane was removed), or leaves: finished
    or preempted while planned steps still name its blocks.
    """

    # What every step of every sequence looks at comes first and stands together: with thousands of sequences the
    # scheduler's time is that of fetching them from memory.
    number: int
    max_length: int
    tokens: Ints
    blocks: Ints = field(init=False)
    length: int = field(init=False)
    num_prompt: int = field(init=False)
    num_planned: int = 0
    num_stored: int = 0
    num_steps: int = 0
    """Planned, uncommitted steps that name it: until there are none its blocks may be written."""
    num_promised: int = 0
    promised_step: int = -1
    promised_sample: int = 0
    next_lane: int | None = None
    """Where it goes as soon as no planned step names it; until then it is not planned."""
    group: int | None = None
    """Of its blocks; the last one's where they are spread over several."""
    parts: tuple[Part, ...] = ()
    """Where its blocks lie, if they are spread over several groups; else none."""
    copied: int | None = None
    """The block, held too, of which the block of its first row must become a copy before it is written."""
    finish_reason: str | None = None
    is_step_by_step: bool = field(init=False)
    has_rules: bool = field(init=False)
    """Whether its draws need more than logits, filters and seed."""
    mask: bytes | None = None
    """What its constraint allows behind its tokens; None without one."""
    index: int
    """Which of its request's samples it is."""
    seed: int = field(init=False)
    filters: Filters = field(init=False)
    top_logprobs: int = field(init=False)
    stop_tokens: frozenset[int] = field(init=False)
    num_cached: int = -1
    """Tokens of the prompt that were there when it first ran; -1 until then."""
    request: Request
    arrival: int
    rank: tuple[int, int, int]
    """Smaller goes first."""
    contents: Contents
    lane: int | None = None
    spare: Ints = field(default_factory=lambda: array("i"))
    """One block for each further sample, for what its own tail of the prompt will be."""
    width: int = 1
    """Sequences that it counts for: before the fork all of its request."""
    num_scored: int = 0
    """The prompt's positions up to this one are scored; 0 is the first, which follows nothing."""
    told_at: int | None = None
    """The step by which the compute worker of its lane got its sampler state."""
    is_preempted: bool = False

    def __post_init__(self) -> None:
        request = self.request
        self.num_prompt = len(request.prompt)
        self.length = len(self.tokens)
        self.blocks = array("i")
        self.seed, self.filters, self.stop_tokens = request.seed, request.filters, request.stop_tokens
        self.is_step_by_step = request.step_by_step or request.constraint is not None
        self.has_rules = request.rules is not None or request.constraint is not None
        self.top_logprobs = -1 if request.logprobs is None else request.logprobs

    @property
    def num_outputs(self) -> int:
        """Committed output tokens."""
        return len(self.tokens) - self.num_prompt

    @property
    def max_stored(self) -> int:
        """Most tokens it will ever store: the last output needs no K and V."""
        return self.max_length - 1

    @property
    def is_finished(self) -> bool:
        """Whether it gets no more tokens; its blocks may still be named by planned steps."""
        return self.finish_reason is not None

    @property
    def wants_scores(self) -> bool:
        """Whether tokens of its prompt are still to be scored."""
        return self.request.prompt_logprobs is not None and self.num_scored < self.num_prompt - 1

    @property
    def is_leaving(self) -> bool:
        """Whether it gives its blocks back when no planned step names it any more."""
        return self.is_preempted or self.finish_reason is not None

    @property
    def ranges(self) -> list[tuple[int, int, int]]:
        """Group, first block, and the block behind the last, of each part of its blocks."""
        if not self.parts:
            return [] if self.group is None else [(self.group, 0, len(self.blocks))]
        stops = [*(part.start for part in self.parts[1:]), len(self.blocks)]
        return [(part.group, part.start, stop) for part, stop in zip(self.parts, stops, strict=True)]

    def lies_in(self, group: int) -> bool:
        """Whether blocks of this group are among its own."""
        return self.group == group or any(part.group == group for part in self.parts)

    def is_ready_behind(self, step: int) -> bool:
        """Whether a step may be planned for it now, behind its lane's newest planned step.

        A token that isn't known yet can only be had from that very step.
        """
        if self.length == self.max_length or self.next_lane is not None:
            return False  # its last token is promised, or it is about to change lanes
        return not self.num_promised or (self.promised_step == step and not self.is_step_by_step)

    def plan(self, count: int) -> None:
        """A step was planned that computes its next `count` tokens."""
        self.num_planned += count
        self.num_steps += 1

    def promise(self, step: int, sample: int) -> None:
        """A planned step will draw its next token."""
        self.promised_step, self.promised_sample = step, sample
        self.num_promised += 1
        self.length += 1

    def undo(self, step: int, count: int, draws: bool) -> None:
        """The newest planned step is lost: as if it had never been planned. What is promised then, see `recall`."""
        self.num_planned -= count
        self.num_steps -= 1
        if self.told_at == step:
            self.told_at = None
        if draws:
            self.num_promised -= 1
            self.length -= 1

    def recall(self, step: int, sample: int) -> None:
        """Of the tokens that are promised still, this is the newest."""
        self.promised_step, self.promised_sample = step, sample

    def append(self, token: int) -> None:
        """Take the token that was promised first, and see whether it is the last."""
        self.num_promised -= 1
        self.tokens.append(token)
        if token in self.stop_tokens:
            self.finish_reason = "stop"
        elif len(self.tokens) == self.max_length:
            self.finish_reason = "length"

    def forget(self) -> None:
        """Everything that was stored is gone, and no planned step names it: back to its tokens alone."""
        self.num_stored = self.num_planned = 0
        self.blocks, self.spare, self.parts = array("i"), array("i"), ()
        self.group = self.lane = self.next_lane = self.copied = self.told_at = None
        self.is_preempted = False
