"""A request on its way through the engine. Only the scheduler changes it."""

from array import array
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple, Protocol

from pannier.scheduler.blocks import Ints
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
        """The mask behind these output tokens: token t is bit t % 8 of byte t // 8, whole 32-bit words."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the gateway asks for, already checked and resolved."""

    sequences: tuple[int, ...]
    """One number for each sample of the prompt, each used once."""
    prompt: Ints
    max_tokens: int
    filters: Filters = Filters()
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


class Output(NamedTuple):
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


class Promise(NamedTuple):
    """A token that is not known yet: what sample number `sample` of the planned step `step` will draw."""

    step: int
    sample: int


@dataclass(eq=False, slots=True)
class Sequence:
    """Tokens, blocks and progress of one request.

    Its tokens, from the certain to the promised:

    ================================  ======================================================
    num_stored                        K and V written by committed steps
    num_planned                       the same once the planned steps have committed
    len(tokens)                       prompt and committed outputs
    len(tokens) + len(promised)       with the outputs that planned steps will draw
    ================================  ======================================================
    """

    request: Request
    max_outputs: int
    tokens: Ints
    promised: list[Promise] = field(default_factory=list)
    num_stored: int = 0
    num_planned: int = 0
    num_steps: int = 0
    """Planned, uncommitted steps that name it: until there are none its blocks may be written."""
    lane: int | None = None
    group: int | None = None
    blocks: Ints = field(default_factory=lambda: array("i"))
    finish_reason: str | None = None
    num_prompt: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt = len(self.request.prompt)

    @property
    def number(self) -> int:
        """The number by which the gateway and the wire know it."""
        return self.request.sequence

    @property
    def num_outputs(self) -> int:
        """Committed output tokens."""
        return len(self.tokens) - self.num_prompt

    @property
    def max_stored(self) -> int:
        """Most tokens it will ever store: the last output needs no K and V."""
        return self.num_prompt + self.max_outputs - 1

    @property
    def num_unplanned(self) -> int:
        """Tokens, known or promised, that no step computes yet."""
        return len(self.tokens) + len(self.promised) - self.num_planned

    @property
    def is_finished(self) -> bool:
        """Whether it gets no more tokens; its blocks may still be named by planned steps."""
        return self.finish_reason is not None

    @property
    def is_decoding(self) -> bool:
        """Whether its next row is one new token rather than (the rest of) what is known already."""
        return self.num_planned >= self.num_prompt and self.num_unplanned == 1

    @property
    def is_ready(self) -> bool:
        """Whether a step may be planned for it now."""
        if self.promised and self.request.step_by_step:
            return False
        return self.num_outputs + len(self.promised) < self.max_outputs

    def plan(self, count: int, promise: Promise | None) -> None:
        """A step was planned that computes its next `count` tokens and, with a promise, draws one."""
        self.num_planned += count
        self.num_steps += 1
        if promise is not None:
            self.promised.append(promise)

    def commit(self, count: int, draws: bool) -> None:
        """The oldest planned step is done."""
        self.num_stored += count
        self.num_steps -= 1
        if draws:
            del self.promised[0]

    def undo(self, count: int, draws: bool) -> None:
        """The newest planned step is lost: as if it had never been planned."""
        self.num_planned -= count
        self.num_steps -= 1
        if draws:
            self.promised.pop()

    def append(self, token: int) -> None:
        """Take the next output token and see whether it is the last."""
        self.tokens.append(token)
        if token in self.request.eos_tokens:
            self.finish_reason = "stop"
        elif self.num_outputs == self.max_outputs:
            self.finish_reason = "length"

    def keep(self, num_outputs: int) -> None:
        """Forget all but the first `num_outputs` output tokens."""
        if not 0 <= num_outputs <= self.num_outputs:
            raise ValueError(f"keep is {num_outputs}; sequence {self.number} has {self.num_outputs} output tokens")
        del self.tokens[self.num_prompt + num_outputs :]
