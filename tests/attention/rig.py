"""A compute worker by hand: it keeps all keys and values itself, and knows by definition what attention must answer."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from pannier.attention.core import AttentionCore, Reply, Tensors
from pannier.ops.kv_cache import KVCache
from pannier.wire import ComputeToAttention, Dtype
from pannier.wire import messages as m
from pannier.wire.messages import SegmentKind

Frame = tuple[ComputeToAttention, Tensors]
LIFE = 77
CALLS = (
    m.CallGeometry(8, 4, 16, 16, 0.25, 0, 0.0),
    m.CallGeometry(6, 3, 8, 12, 0.4, 5, 0.0),
    m.CallGeometry(4, 2, 12, 4, 0.3, 0, 3.0),
)
"""Unlike heads, sizes, windows and caps from call to call."""
WHOLE = tuple(m.HeadRange(0, call.kv_heads) for call in CALLS)
UNEVEN = (
    (m.HeadRange(0, 3), m.HeadRange(0, 2), m.HeadRange(0, 1)),
    (m.HeadRange(3, 4), m.HeadRange(2, 3), m.HeadRange(1, 2)),
)


class NanCache(KVCache):
    """A cache whose unwritten tokens can't be read without being noticed."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        for call in range(len(self.shapes)):
            for stored in self.scales(call) or (self.keys(call), self.values(call)):
                stored.fill_(float("nan"))

    def contents(self) -> list[torch.Tensor]:
        """A copy of everything in it."""
        return [stored.clone() for stored in (*self._keys, *self._values)]


def make_core(
    heads: tuple[m.HeadRange, ...] = WHOLE,
    *,
    group: int = 0,
    num_blocks: int = 40,
    block_size: int = 4,
    wire_dtype: Dtype = Dtype.FLOAT32,
    kv_dtype: Dtype = Dtype.FLOAT32,
) -> AttentionCore:
    """A core to which a shard was assigned, its cache full of NaN."""
    core = AttentionCore(torch.device("cpu"), NanCache)
    core.assign(m.AttentionAssign(LIFE, group, 0, CALLS, heads, num_blocks, block_size, kv_dtype, wire_dtype))
    return core


def contents(core: AttentionCore) -> list[torch.Tensor]:
    """A copy of all blocks of a core."""
    assert core.shard is not None
    assert isinstance(core.shard.cache, NanCache)
    return core.shard.cache.contents()


def unchanged(core: AttentionCore, before: list[torch.Tensor], but_for: Sequence[int] = ()) -> bool:
    """Whether no byte was written since, outside the blocks excepted."""
    others = [block for block in range(len(before[0])) if block not in but_for]
    pairs = zip(contents(core), before, strict=True)
    return all(torch.equal(now[others].view(torch.int32), then[others].view(torch.int32)) for now, then in pairs)


@dataclass
class Stored:
    """Blocks, and the keys [n, G, Dk] and values [n, G, Dv] of every call."""

    blocks: Sequence[int]
    keys: list[torch.Tensor] = field(default_factory=lambda: [torch.empty(0, c.kv_heads, c.k_size) for c in CALLS])
    values: list[torch.Tensor] = field(default_factory=lambda: [torch.empty(0, c.kv_heads, c.v_size) for c in CALLS])

    def __len__(self) -> int:
        return len(self.keys[0])


@dataclass(frozen=True)
class Rows:
    """Rows of one sequence in a step."""

    kind: SegmentKind
    sequence: Stored
    count: int = 1


def decode(sequence: Stored) -> Rows:
    return Rows(SegmentKind.DECODE, sequence)


def chunk(sequence: Stored, count: int) -> Rows:
    return Rows(SegmentKind.CHUNK, sequence, count)


Partials = tuple[torch.Tensor, torch.Tensor]


def dense(call: int, q: torch.Tensor, position: int, keys: torch.Tensor, values: torch.Tensor, first: int) -> Partials:
    """One row by definition, in fp64: q [H, Dk] at `position` over keys [n, G, Dk] at `first` on: o [H, Dv], l [H]."""
    geometry = CALLS[call]
    seen = [
        i
        for i in range(len(keys))
        if first + i <= position and (geometry.window == 0 or first + i > position - geometry.window)
    ]
    if not seen:
        return torch.zeros(len(q), geometry.v_size), torch.full((len(q),), -torch.inf)
    k, v = (x[seen].double().repeat_interleave(geometry.q_heads // geometry.kv_heads, 1) for x in (keys, values))
    scores = torch.einsum("hd,nhd->hn", q.double(), k) * geometry.scale
    if geometry.softcap:
        scores = geometry.softcap * torch.tanh(scores / geometry.softcap)
    return torch.einsum("hn,nhd->hd", scores.softmax(-1), v).float(), scores.logsumexp(-1).float()


@dataclass
class MadeStep:
    """Frames of one step for one shard, and for each call what must be answered over all heads."""

    begin: Frame
    pieces: list[Frame]
    end: Frame
    answers: dict[int, Partials]

    @property
    def frames(self) -> list[Frame]:
        """In the order in which a compute worker sends them."""
        return [self.begin, *self.pieces, self.end]


class Hand:
    """Makes steps; sequences grow as steps are made."""

    def __init__(self, *, session: int = 1, lane: int = 0, seed: int = 0, group: int = 0) -> None:
        self.session, self.lane, self.group = session, lane, group
        self._generator = torch.Generator().manual_seed(seed)
        self._grown: dict[tuple[int, int], Partials] = {}

    def step(
        self,
        number: int,
        plan: Sequence[Rows],
        shards: Sequence[tuple[m.HeadRange, ...]] = (WHOLE,),
        *,
        copies: tuple[m.BlockCopy, ...] = (),
        piece_rows: int = 3,
        lse_from: int = 0,
    ) -> list[MadeStep]:
        """One step as each shard is told of it. Rows in legal order: decode, chunks with a past, fresh chunks."""
        frame = (LIFE, self.session, number, self.lane)
        segments, tables = self._segments(plan)
        begin = m.BeginStep(*frame, segments, copies, ())
        made = [
            MadeStep((begin, [torch.tensor(tables, dtype=torch.int32)]), [], (m.EndStep(*frame, 0), []), {})
            for _ in shards
        ]
        asked = [s.answers for s in segments for _ in range(s.num_queries)]
        num_asked = sum(asked)
        for call, geometry in enumerate(CALLS):
            q, k, v = self._draw(len(asked), geometry)
            expected = self._expected(call, plan, segments, q, k, v)
            for step, heads in zip(made, shards, strict=True):
                own, ratio = heads[call], geometry.q_heads // geometry.kv_heads
                own_k, own_v = k[:, own.start : own.stop], v[:, own.start : own.stop]
                step.answers[call] = expected
                if num_asked:
                    queries = q[:num_asked, own.start * ratio : own.stop * ratio]
                    piece = m.Piece(*frame, call, 0, True, lse_from, ())
                    step.pieces.append((piece, [queries, own_k[:num_asked], own_v[:num_asked]]))
                for first in range(num_asked, len(asked), piece_rows):
                    stop = min(first + piece_rows, len(asked))
                    piece = m.Piece(*frame, call, first, False, 0, ())
                    step.pieces.append((piece, [own_k[first:stop], own_v[first:stop]]))
        for step in made:
            step.end = (m.EndStep(*frame, len(step.pieces)), [])
        self._grow(plan)
        return made

    def only(self, number: int, plan: Sequence[Rows], **how: Any) -> MadeStep:
        """One step for a shard that has all heads."""
        (made,) = self.step(number, plan, **how)
        return made

    def _segments(self, plan: Sequence[Rows]) -> tuple[tuple[m.Segment, ...], list[int]]:
        segments: list[m.Segment] = []
        tables: list[int] = []
        row = 0
        for rows in plan:
            stored, blocks = len(rows.sequence), rows.sequence.blocks
            segments.append(
                m.Segment(rows.kind, self.group, 0, len(tables), len(blocks), stored, stored, row, rows.count)
            )
            tables.extend(blocks)
            row += rows.count
        return tuple(segments), tables

    def _draw(self, rows: int, geometry: m.CallGeometry) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return (
            torch.randn(rows, geometry.q_heads, geometry.k_size, generator=self._generator),
            torch.randn(rows, geometry.kv_heads, geometry.k_size, generator=self._generator),
            torch.randn(rows, geometry.kv_heads, geometry.v_size, generator=self._generator),
        )

    def _expected(
        self,
        call: int,
        plan: Sequence[Rows],
        segments: Sequence[m.Segment],
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> Partials:
        """What the stored tokens give; new keys and values are noted for `_grow`."""
        parts: list[Partials] = []
        for rows, segment in zip(plan, segments, strict=True):
            own = slice(segment.query_start, segment.query_start + segment.num_queries)
            keys, values = rows.sequence.keys[call], rows.sequence.values[call]
            grown = torch.cat([keys, k[own]]), torch.cat([values, v[own]])
            if rows.kind is SegmentKind.DECODE:
                keys, values = grown
            if segment.answers:
                parts += [
                    dense(call, row, segment.query_position + i, keys, values, segment.first_position)
                    for i, row in enumerate(q[own])
                ]
            self._grown[id(rows), call] = grown
        if not parts:
            return torch.empty(0), torch.empty(0)
        return torch.stack([o for o, _ in parts]), torch.stack([lse for _, lse in parts])

    def _grow(self, plan: Sequence[Rows]) -> None:
        for rows in plan:
            for call in range(len(CALLS)):
                rows.sequence.keys[call], rows.sequence.values[call] = self._grown[id(rows), call]


def feed(core: AttentionCore, frames: Iterable[Frame], compute: str = "c0") -> list[Reply]:
    """All replies to some frames."""
    return [reply for message, tensors in frames for reply in core.receive(compute, message, tensors)]


def answers_of(replies: Iterable[Reply]) -> dict[int, Tensors]:
    """o and LSE by call."""
    return {message.call: tensors for message, tensors in replies if isinstance(message, m.Answer)}


def kinds(replies: Iterable[Reply]) -> list[str]:
    """Names of the replies."""
    return [type(message).__name__ for message, _ in replies]


def assert_answers(
    replies_of_shards: Sequence[Iterable[Reply]],
    expected: dict[int, Partials],
    lse_from: int = 0,
    tolerance: float = 1e-5,
) -> None:
    """The shards' answers, side by side, are those over all heads."""
    of_shards = [answers_of(replies) for replies in replies_of_shards]
    for call, (o, lse) in expected.items():
        if not len(o):
            assert all(call not in answers for answers in of_shards)
            continue
        ours = torch.cat([answers[call][0] for answers in of_shards], 1)
        ours_lse = torch.cat([answers[call][1] for answers in of_shards], 1)
        torch.testing.assert_close(ours, o, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(ours_lse, lse[lse_from:], rtol=tolerance, atol=tolerance)
