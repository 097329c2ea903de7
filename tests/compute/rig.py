"""A compute core over real attention cores, and a gateway by hand that plans its steps."""

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import torch
from transformers import LlamaForCausalLM

from pannier.attention.core import AttentionCore
from pannier.compute.core import ComputeCore
from pannier.compute.link import InProcessLink, Link, Received, Tensors
from pannier.slicer import SlicedModel
from pannier.wire import ComputeToAttention, Dtype, WorkerToGatewayData
from pannier.wire import messages as m
from pannier.wire.messages import SegmentKind

LIFE = 42
BLOCK_SIZE = 4
NUM_BLOCKS = 64
GREEDY = m.Filters()
R = TypeVar("R", bound=m.Message)
WrapLink = Callable[[Link], Link]


class HeldLink:
    """A link whose answers stay away until they are let through, as on a slow network."""

    kind = "held"
    is_up = True
    lost: str | None = None

    def __init__(self, inner: Link) -> None:
        self.name = inner.name
        self.sent: list[ComputeToAttention] = []
        self.held = True
        self._inner = inner
        self._arrived: deque[Received] = deque()

    def send(self, message: ComputeToAttention, tensors: Tensors) -> None:
        self.sent.append(message)
        self._inner.send(message, tensors)

    def receive(self) -> Received | None:
        if not self.held:
            self.let_through()
        return self._arrived.popleft() if self._arrived else None

    def let_through(self, count: int | None = None) -> int:
        """Let some answers arrive, or all there are; how many."""
        for number in itertools.count():
            if number == count or (received := self._inner.receive()) is None:
                return number
            self._arrived.append(received)
        raise AssertionError

    def flush(self) -> bool:
        return True

    def close(self) -> None:
        pass


def split_heads(kv_heads: int, shards: int) -> list[m.HeadRange]:
    """Contiguous ranges, the first ones larger."""
    bounds = [-(-kv_heads * i // shards) for i in range(shards + 1)]
    return [m.HeadRange(*pair) for pair in itertools.pairwise(bounds)]


@dataclass
class Text:
    """One sequence: its tokens, how many of them are stored, and its blocks in the group that stores what comes next.

    `first_position` is that of the first token in these blocks; what comes before lies in another group.
    """

    sequence: int
    tokens: list[int]
    blocks: Sequence[int]
    group: int = 0
    stored: int = 0
    first_position: int = 0


class Stack:
    """Groups of attention cores, each group's shards uneven, and one compute core."""

    def __init__(
        self,
        model: SlicedModel,
        *,
        shards: Sequence[int] = (1,),
        lanes: int = 2,
        wrap: WrapLink = lambda link: link,
        dtype: Dtype = Dtype.FLOAT32,
    ) -> None:
        """`dtype` is that of blocks and links."""
        self.replies: list[WorkerToGatewayData] = []
        self.attention: dict[str, AttentionCore] = {}
        self.wrap = wrap
        self._dtype = dtype
        self.core = self.make_core(model, lanes)
        self._steps = itertools.count(1)
        calls = tuple(
            m.CallGeometry(c.q_heads, c.kv_heads, c.k_size, c.v_size, c.scale, c.window, c.softcap) for c in model.calls
        )
        groups = tuple(self._group(number, count, calls) for number, count in enumerate(shards))
        self.session = 1
        self.core.obey(m.ComputeAssign(LIFE, 1, groups, 512, BLOCK_SIZE, wire_dtype=dtype), [])
        self.take(m.Ready)

    def _group(self, group: int, shards: int, calls: tuple[m.CallGeometry, ...]) -> m.GroupAddress:
        ranges = [split_heads(call.kv_heads, shards) for call in calls]
        addresses = []
        for shard in range(shards):
            heads = tuple(of_call[shard] for of_call in ranges)
            core = self.attention[f"a{group}.{shard}"] = AttentionCore(torch.device("cpu"))
            core.assign(
                m.AttentionAssign(LIFE, group, shard, calls, heads, NUM_BLOCKS, BLOCK_SIZE, self._dtype, self._dtype)
            )
            addresses.append(m.ShardAddress(f"a{group}.{shard}", "", heads))
        return m.GroupAddress(group, tuple(addresses))

    def make_core(self, model: SlicedModel, lanes: int) -> ComputeCore:
        return ComputeCore(model, lanes, self.connect, self.replies.append)

    def connect(self, address: m.ShardAddress) -> Link:
        return self.wrap(InProcessLink("c0", address.name, self.attention[address.name]))

    def link(self, name: str = "a0.0") -> HeldLink:
        """A link that `wrap` made a held one."""
        link = self.core.links[name]
        assert isinstance(link, HeldLink)
        return link

    def pump(self) -> None:
        """Go on for as long as anything can."""
        while True:
            can_go_on = self.core.advance()
            for link in list(self.core.links.values()):
                while (received := link.receive()) is not None:
                    self.core.receive(link, *received)
                    can_go_on = True
            if not can_go_on:
                return

    def send(self, step: "MadeStep") -> None:
        self.core.obey(step.message, step.tensors)

    def run(self, *steps: "MadeStep") -> list[m.StepDone]:
        """Send steps, and go on until all are done."""
        for step in steps:
            self.send(step)
        self.pump()
        return self.take(m.StepDone, len(steps))

    def take(self, kind: type[R], count: int = 1) -> list[R]:
        """All replies so far, which are `count` of one kind."""
        taken, self.replies[:] = list(self.replies), []
        assert [type(reply) for reply in taken] == [kind] * count, taken
        return [reply for reply in taken if isinstance(reply, kind)]

    def new_session(self) -> None:
        """Fence, as the gateway does, and start the next session."""
        for core in self.attention.values():
            core.fence(m.Fence(LIFE, "c0", self.session))
        self.session += 1
        self.core.obey(m.NewSession(LIFE, self.session), [])
        assert [ready.session for ready in self.take(m.Ready)] == [self.session]

    def step(self, lane: int = 0) -> "Plan":
        """A step to be filled with rows."""
        return Plan(self, next(self._steps), lane)


@dataclass
class MadeStep:
    """A step as the gateway sends it."""

    message: m.Step
    tensors: Tensors


@dataclass
class Plan:
    """Rows in legal order: decode rows, chunks with a past, fresh chunks. Texts grow as rows are added."""

    stack: Stack
    number: int
    lane: int
    segments: list[m.Segment] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    tables: list[int] = field(default_factory=list)
    samples: list[m.Sample] = field(default_factory=list)
    previous: list[m.Previous] = field(default_factory=list)
    scores: list[m.Score] = field(default_factory=list)
    scored: list[int] = field(default_factory=list)
    states: list[m.SamplerState] = field(default_factory=list)
    masks: list[list[int]] = field(default_factory=list)

    def decode(self, text: Text, **sample: Any) -> "Plan":
        """The last token of a text, sampled."""
        return self._rows(SegmentKind.DECODE, text, text.tokens[text.stored :]).sample(text, **sample)

    def decode_previous(self, text: Text, step: "MadeStep", place: int, **sample: Any) -> "Plan":
        """A token that the lane's preceding step will draw."""
        self.previous.append(m.Previous(len(self.ids), step.message.step, place))
        return self._rows(SegmentKind.DECODE, text, [0]).sample(text, **sample)

    def chunk(self, text: Text, count: int) -> "Plan":
        """The next tokens of a text, not sampled."""
        return self._rows(SegmentKind.CHUNK, text, text.tokens[text.stored : text.stored + count])

    def last_chunk(self, text: Text, **sample: Any) -> "Plan":
        """All the tokens that are left, the last one sampled."""
        return self.chunk(text, len(text.tokens) - text.stored).sample(text, **sample)

    def sample(
        self,
        text: Text,
        filters: m.Filters = GREEDY,
        seed: int = 0,
        top: int = 20,
        index: int = 0,
        version: int = 0,
        mask: int = -1,
    ) -> "Plan":
        """Sample the last row added."""
        row = len(self.ids) - 1
        self.samples.append(m.Sample(row, text.sequence, text.stored, index, seed, filters, top, version, mask))
        return self

    def score(self, text: Text, count: int, top: int = 20) -> "Plan":
        """Score what follows in the text behind the last `count` rows added behind which something does."""
        last = min(text.stored, len(text.tokens) - 1) - 1
        row = len(self.ids) - (text.stored - last) - count + 1
        self.scores.append(m.Score(text.sequence, row, count, last + 2 - count, len(self.scored), top))
        self.scored += text.tokens[last + 2 - count : last + 2]
        return self

    def state(self, *states: m.SamplerState) -> "Plan":
        """Bring sampler states along."""
        self.states += states
        return self

    def read(self, other: Text) -> "Plan":
        """The rows added last also attend to all that another text's blocks hold."""
        last = self.segments[-1]
        self.segments.append(
            msgspec.structs.replace(
                last,
                kind=SegmentKind.READ,
                group=other.group,
                first_position=other.first_position,
                first_block=len(self.tables),
                num_blocks=len(other.blocks),
                num_stored=other.stored - other.first_position,
            )
        )
        self.tables += other.blocks
        return self

    def made(self) -> MadeStep:
        """The step."""
        message = m.Step(
            LIFE, self.stack.session, self.number, self.lane, tuple(self.segments), tuple(self.previous),
            tuple(self.samples), tuple(self.scores), (), tuple(self.states), (),
        )  # fmt: skip
        parts = (self.ids, self.tables, self.scored, self.masks or [[]])
        return MadeStep(message, [torch.tensor(part, dtype=torch.int32) for part in parts])

    def _rows(self, kind: SegmentKind, text: Text, ids: Sequence[int]) -> "Plan":
        self.segments.append(
            m.Segment(
                kind, text.group, text.first_position, len(self.tables), len(text.blocks),
                text.stored - text.first_position, text.stored, len(self.ids), len(ids),
            )
        )  # fmt: skip
        self.ids += ids
        self.tables += text.blocks
        text.stored += len(ids)
        return self


def texts(lengths: Sequence[int], seed: int = 0, groups: int = 1) -> list[Text]:
    """Random prompts with shuffled blocks of their own, on the groups in turn."""
    generator = torch.Generator().manual_seed(seed)
    room = NUM_BLOCKS // len(lengths)
    blocks = torch.randperm(NUM_BLOCKS, generator=generator).tolist()
    return [
        Text(i, torch.randint(0, 96, (n,), generator=generator).tolist(), blocks[i * room : (i + 1) * room], i % groups)
        for i, n in enumerate(lengths)
    ]


def accept(text: Text, drawn: m.Drawn) -> None:
    """Append what was drawn."""
    assert drawn.sequence == text.sequence
    text.tokens.append(drawn.token)


def reference(whole: LlamaForCausalLM, tokens: Sequence[int]) -> torch.Tensor:
    """Log-probabilities [V] of the token behind these, by the uncut model."""
    with torch.inference_mode():
        logits: torch.Tensor = whole(torch.tensor([tokens])).logits
    return logits[0, -1].log_softmax(-1)


def assert_drawn(whole: LlamaForCausalLM, tokens: Sequence[int], drawn: m.Drawn) -> None:
    """Greedily drawn from the uncut model's log-probabilities, and reported with them."""
    expected = reference(whole, tokens)
    assert drawn.token == int(expected.argmax())
    ours = torch.tensor([top.logprob for top in drawn.top])
    theirs = expected[[top.token for top in drawn.top]]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    assert drawn.logprob is not None
    assert abs(drawn.logprob - float(expected[drawn.token])) < 1e-4
