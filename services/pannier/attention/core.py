"""What an attention worker does with each message. No sockets, no clocks: messages in, replies out.

Frames may arrive in any order, since a link may have several flows. A lane's next step begins only when the step
before it is complete; what belongs to a later step waits. What belongs to a step that is over, to a session that
was fenced, or to another gateway's life is dropped and counted.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TypeAlias, assert_never

import torch

from pannier.attention.pace import Stretch
from pannier.attention.shard import MakeCache, Shard, ShardStep
from pannier.ops.kv_cache import KVCache
from pannier.runtime.errors import DeviceError
from pannier.runtime.strict import Converted, Guard
from pannier.runtime.tracing import StepSpans, Tracer
from pannier.wire import AttentionToCompute, ComputeToAttention, WireError
from pannier.wire import messages as m

Tensors: TypeAlias = list[torch.Tensor]
Reply: TypeAlias = tuple[AttentionToCompute, Tensors]


@dataclass
class Lane:
    """One lane of one compute worker: at most one step under way, and what came early."""

    step: int = -1
    """Number of the step under way, or of the last one that is over."""
    running: ShardStep | None = None
    pieces: int = 0
    expected_pieces: int | None = None
    spans: StepSpans | None = None
    """Of the step under way, in the traces that it is a part of."""
    early: dict[int, list[tuple[ComputeToAttention, Tensors]]] = field(default_factory=lambda: defaultdict(list))


@dataclass
class Session:
    """A compute worker's present session and its lanes."""

    number: int
    lanes: dict[int, Lane] = field(default_factory=lambda: defaultdict(Lane))


class AttentionCore:
    """State of one attention worker: its shard, and where every compute worker's lanes stand."""

    def __init__(
        self,
        device: torch.device,
        make_cache: MakeCache = KVCache,
        stretch: Stretch | None = None,
        *,
        strict: bool = False,
        tracer: Tracer | None = None,
    ) -> None:
        self.device = device
        self._tracer = tracer
        self._strict = strict
        self._guard: AbstractContextManager[object] = nullcontext()
        self._stretch = stretch
        self.shard: Shard | None = None
        self.counters: Counter[str] = Counter()
        self._make_cache = make_cache
        self._sessions: dict[str, Session] = {}
        self._fenced: dict[str, int] = defaultdict(int)

    def assign(self, assign: m.AttentionAssign) -> None:
        """Allocate the blocks; a former assignment and all of it is gone. Raises `DeviceError` without room."""
        if self.shard is not None and self.shard.assign.life != assign.life:
            self._fenced.clear()  # another gateway counts its sessions anew
        self.shard, self._guard = None, nullcontext()  # give the memory back before asking for it again
        self._sessions.clear()
        try:
            self.shard = Shard(assign, self.device, self._make_cache)
            if self._strict:
                self._guard = Guard("the KV cache", self.shard.cache.tensors)
        except RuntimeError as error:  # torch's word for memory that isn't there; its own subclass only on GPUs
            raise DeviceError(f"{self.device} has no room for {assign.num_blocks} KV blocks: {error}") from error

    def fence(self, fence: m.Fence) -> m.Fenced:
        """End the sessions of a compute worker: from now on none of them can write."""
        self._fenced[fence.compute] = max(self._fenced[fence.compute], fence.session)
        session = self._sessions.get(fence.compute)
        if session is not None and session.number <= fence.session:
            del self._sessions[fence.compute]
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # launched writes land before the blocks are given to others
        return m.Fenced(fence.life, fence.compute, fence.session)

    def receive(self, compute: str, message: ComputeToAttention, tensors: Tensors) -> Iterable[Reply]:
        """Replies to one message of a compute worker, in order. After the last one its tensors are not looked at."""
        lane = self._lane(compute, message)
        if lane is None:
            self.counters["stale_frames"] += 1
            return
        yield from self._attempt(lane, message, tensors)
        while lane.running is None and (early := _early_begin(lane)) is not None:
            yield from self._attempt(lane, *early)

    def _attempt(self, lane: Lane, message: ComputeToAttention, tensors: Tensors) -> Iterable[Reply]:
        try:
            yield from self._receive_in_lane(lane, message, tensors)
        except (WireError, Converted) as error:
            yield from self._fail(lane, message, str(error))
        except torch.OutOfMemoryError as error:
            yield from self._fail(lane, message, f"out of memory on {self.device}: {error}")

    def _lane(self, compute: str, message: ComputeToAttention) -> Lane | None:
        """The lane that a message belongs to; None if it comes from the past or from a stranger."""
        if self.shard is None or message.life != self.shard.assign.life or message.session <= self._fenced[compute]:
            return None
        session = self._sessions.get(compute)
        if session is None or message.session > session.number:
            session = self._sessions[compute] = Session(message.session)
        if message.session < session.number:
            return None
        lane = session.lanes[message.lane]
        over = message.step < lane.step or (message.step == lane.step and lane.running is None)
        return None if over and not isinstance(message, m.AbortStep) else lane

    def _receive_in_lane(self, lane: Lane, message: ComputeToAttention, tensors: Tensors) -> Iterable[Reply]:
        if isinstance(message, m.AbortStep):
            yield from self._abort(lane, message)
        elif lane.running is not None and message.step == lane.step:
            yield from self._work(lane, lane.running, message, tensors)
        elif isinstance(message, m.BeginStep) and lane.running is None:
            yield from self._begin(lane, message, tensors)
        else:
            # Copies: what came through shared memory is given back when this returns.
            lane.early[message.step].append((message, [tensor.clone() for tensor in tensors]))

    def _begin(self, lane: Lane, begin: m.BeginStep, tensors: Tensors) -> Iterable[Reply]:
        assert self.shard is not None
        for step in [step for step in lane.early if step < begin.step]:
            self.counters["stale_frames"] += len(lane.early.pop(step))
        lane.step, lane.pieces, lane.expected_pieces = begin.step, 0, None
        lane.running = self.shard.begin(begin, _block_tables(tensors))
        lane.spans = self._spans(begin)
        for message, early_tensors in lane.early.pop(begin.step, ()):
            if lane.running is None:  # complete, and this is one too many
                self.counters["stale_frames"] += 1
            else:
                yield from self._work(lane, lane.running, message, early_tensors)

    def _spans(self, begin: m.BeginStep) -> StepSpans | None:
        return StepSpans(self._tracer, "attention", begin.traces, begin.step, begin.lane) if begin.traces else None

    def _work(self, lane: Lane, running: ShardStep, message: ComputeToAttention, tensors: Tensors) -> Iterable[Reply]:
        match message:
            case m.Piece():
                yield self._piece(running, message, tensors)
                lane.pieces += 1
            case m.EndStep():
                lane.expected_pieces = message.num_pieces
            case m.BeginStep() | m.AbortStep():
                raise WireError(f"step {message.step} began twice")
            case _:
                assert_never(message)
        if lane.expected_pieces is not None and lane.pieces > lane.expected_pieces:
            raise WireError(f"{lane.pieces} pieces of step {message.step} came, which has {lane.expected_pieces}")
        if lane.pieces == lane.expected_pieces:
            yield self._complete(lane, message)

    def _piece(self, running: ShardStep, piece: m.Piece, tensors: Tensors) -> Reply:
        if piece.call not in running.calls:
            raise WireError(f"call {piece.call} is not among those of the step, {running.calls}")
        if [tensor.dim() for tensor in tensors] != [3] * (2 + piece.is_request):
            shapes = [tuple(tensor.shape) for tensor in tensors]
            raise WireError(f"call {piece.call}: a piece has k and v, a request q before them, not shapes {shapes}")
        *queries, k, v = tensors
        assert self.shard is not None
        if self.shard.converts:
            self._count_conversion(self.shard.assign)
        with self._guard:
            running.store(piece.call, piece.first_stored_row, k, v)
            if not queries:
                return m.PieceWritten(piece.life, piece.session, piece.step, piece.lane, piece.call), []
            answer, seconds = running.attend(piece.call, queries[0], piece.lse_from)
        if self._stretch is not None:
            seconds = self._stretch(seconds, len(queries[0]), len(self.shard.assign.calls))
        return m.Answer(piece.life, piece.session, piece.step, piece.lane, piece.call, seconds, ()), answer

    def _count_conversion(self, assign: m.AttentionAssign) -> None:
        """What comes is stored in another type. Raises `Converted` where it is strict not to."""
        if self._strict:
            wire, kv = (dtype.name.lower() for dtype in (assign.wire_dtype, assign.kv_dtype))
            raise Converted(f"dtype_strict: links carry {wire} and K and V are stored in {kv}")
        self.counters["converted_pieces"] += 1

    def _complete(self, lane: Lane, message: ComputeToAttention) -> Reply:
        """The step is over: acknowledge it once the device has written it."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if lane.spans is not None:
            lane.spans.end({"pannier.pieces": lane.pieces})
        lane.running = lane.spans = None
        self.counters["steps"] += 1
        return m.StepWritten(message.life, message.session, message.step, message.lane), []

    def _abort(self, lane: Lane, message: ComputeToAttention) -> Iterable[Reply]:
        if message.step > lane.step and lane.running is not None:
            raise WireError(f"step {message.step} is aborted while step {lane.step} is under way")
        lane.early.pop(message.step, None)
        if message.step >= lane.step:
            self._drop(lane, message, "aborted")
        yield m.StepAborted(message.life, message.session, message.step, message.lane), []

    def _fail(self, lane: Lane, message: ComputeToAttention, reason: str) -> Iterable[Reply]:
        """Say why, and forget the step as if it had been aborted."""
        self.counters["failed_steps"] += 1
        self._drop(lane, message, reason)
        lane.early.pop(message.step, None)
        yield m.StepFailed(message.life, message.session, message.step, message.lane, reason), []

    def _drop(self, lane: Lane, message: ComputeToAttention, reason: str) -> None:
        if lane.spans is not None:
            lane.spans.end({}, reason)
        lane.step, lane.running, lane.spans = message.step, None, None


def _early_begin(lane: Lane) -> tuple[m.BeginStep, Tensors] | None:
    """Take out the first step whose `BeginStep` came while another was under way."""
    for step in sorted(lane.early):
        for place, (message, tensors) in enumerate(lane.early[step]):
            if isinstance(message, m.BeginStep):
                del lane.early[step][place]
                return message, tensors
    return None


def _block_tables(tensors: Tensors) -> list[int]:
    if [(tensor.dtype, tensor.dim()) for tensor in tensors] != [(torch.int32, 1)]:
        raise WireError(f"a step begins with one int32 list of block tables, not {[t.dtype for t in tensors]}")
    tables: list[int] = tensors[0].tolist()
    return tables
