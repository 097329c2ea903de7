"""The compute worker's lanes: which step runs in which, and what wakes it. No sockets, no poller."""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import assert_never

import structlog
import torch

from pannier.compute.emulated_device import EmulatedDevice
from pannier.compute.link import Link, Tensors
from pannier.compute.rows import GroupRows, group_rows
from pannier.compute.sampling import CannotDraw, SamplerStates
from pannier.compute.share import ShardFailed, Share
from pannier.compute.step_clock import Span, StepClock
from pannier.compute.step_run import Inputs, Outcome, PassOn, StepRun
from pannier.compute.wire_dtype import WireDtype
from pannier.net.errors import NetError, PeerGone
from pannier.runtime.strict import Converted, Guard
from pannier.runtime.tracing import StepSpans, Tracer
from pannier.slicer import WHOLE, SlicedModel, Stage
from pannier.wire import AttentionToCompute, StageToStage, WireError, WorkerToGatewayData
from pannier.wire import messages as m
from pannier.wire.tensors import TORCH_DTYPES

ConnectLink = Callable[[m.ShardAddress], Link]
Reply = Callable[[WorkerToGatewayData], None]
NUM_PARTS = 4
"""Of a step: token ids, block tables, scored tokens, masks."""
MAX_GIVEN = 4
"""Steps of one lane that a stage may be ahead of the next: more than a gateway plans."""
log = structlog.get_logger()


@dataclass
class QueuedStep:
    """A step that waits for the one before it in its lane."""

    step: m.Step
    tensors: Tensors


@dataclass
class Lane:
    """One micro-batch in flight: a generator that is resumed when something it waits for has arrived."""

    queue: deque[QueuedStep] = field(default_factory=deque)
    run: StepRun | None = None
    awake: bool = False
    asked: int | None = None
    """The step that lacks sampler states, for which the gateway was asked: it comes again before all others."""
    has_failed: bool = False
    """A step was given up: what follows would read what it has not written. Until the next session."""
    drawn_step: int = -1
    drawn_tokens: torch.Tensor | None = None
    given: dict[int, tuple[m.Activations, Tensors]] = field(default_factory=dict)
    """By step: what the stage before this one has passed on and no step has taken yet."""

    @property
    def can_begin(self) -> bool:
        """Whether its next step is here and may begin."""
        return self.run is None and self.asked is None and bool(self.queue)

    def has_drawn_for(self, step: m.Step) -> bool:
        """Whether the last stage has drawn the tokens that a step begins with."""
        return all(previous.step <= self.drawn_step for previous in step.previous)

    def enqueue(self, queued: QueuedStep) -> None:
        """Behind all others, but for the step that was asked for."""
        if queued.step.step == self.asked:
            self.asked = None
            self.queue.appendleft(queued)
        else:
            self.queue.append(queued)


class ComputeCore:
    """The lanes of one compute worker, its links and its session."""

    def __init__(
        self,
        model: SlicedModel,
        num_lanes: int,
        connect: ConnectLink,
        reply: Reply,
        *,
        stage: Stage = WHOLE,
        pass_on: PassOn | None = None,
        device: EmulatedDevice | None = None,
        record: Callable[[Span], None] | None = None,
        strict: bool = False,
        tracer: Tracer | None = None,
    ) -> None:
        self.links: dict[str, Link] = {}
        self.counters: Counter[str] = Counter()
        self.idle_s = 0.0
        """Seconds in which no lane could go on, for whatever reason."""
        self.step_seconds = dict.fromkeys(m.StepTimes.__struct_fields__, 0.0)
        """Sums of the times of all steps."""
        self._model = model
        self._stage = stage
        self._pass_on = pass_on
        self._device = device
        self._record = record
        self._tracer = tracer
        self._states = SamplerStates(model.vocab_size)
        self._lanes = [Lane() for _ in range(num_lanes)]
        self._connect = connect
        self._reply = reply
        self._groups: dict[int, m.GroupAddress] = {}
        self._strict = strict
        self._guard: AbstractContextManager[object] = Guard("a weight", model.held) if strict else nullcontext()
        self.wire_dtype = WireDtype(model.dtype, model.dtype, self.counters)
        self._life = self._session = 0
        self._is_starting = False
        """The session has begun, and not all of its links are up."""
        self._is_over = False
        """The session has lost a link, and waits to be fenced."""

    def obey(self, message: m.ComputeAssign | m.NewSession | m.Step | m.AbortStep, tensors: Tensors) -> None:
        """Do what the gateway says."""
        match message:
            case m.ComputeAssign():
                self._assign(message)
            case m.NewSession():
                self._start_session(message.session)
                self.look_at_links()
            case m.Step() | m.AbortStep() if (message.life, message.session) != (self._life, self._session):
                self.counters["stale_frames"] += 1
            case m.Step() if self._lanes[message.lane].has_failed:
                self.counters["stale_frames"] += 1
            case m.Step():
                self._lanes[message.lane].enqueue(QueuedStep(message, tensors))
            case m.AbortStep():
                self._abort(message)
            case _:
                assert_never(message)

    def receive(self, link: Link, message: AttentionToCompute, tensors: Tensors) -> None:
        """Hand an attention worker's answer to the step it belongs to, and wake its lane."""
        lane = self._lanes[message.lane] if message.lane < len(self._lanes) else None
        run = lane.run if lane is not None else None
        current = (self._life, self._session, run.step.step if run is not None else None)
        share = run.shares.get(link.name) if run is not None else None
        if lane is None or share is None or (message.life, message.session, message.step) != current:
            self.counters["stale_frames"] += 1
            return
        lane.awake = True
        try:
            share.receive(message, tensors)
        except (ShardFailed, WireError) as error:
            self._fail(lane, str(error))

    def receive_from_stage(self, message: StageToStage, tensors: Tensors) -> None:
        """Take what the stage before this one has computed, or what the last one has drawn. Raises `WireError`."""
        lane = self._lanes[message.lane] if message.lane < len(self._lanes) else None
        if lane is None or lane.has_failed or (message.life, message.session) != (self._life, self._session):
            self.counters["stale_frames"] += 1
            return
        match message:
            case m.Activations() if len(lane.given) < MAX_GIVEN:
                self._give(lane, message, tensors)
            case m.DrawnTokens() if len(tensors) == 1:
                lane.drawn_step, lane.drawn_tokens = message.step, tensors[0]
            case _:
                raise WireError(f"{type(message).__name__} of step {message.step} is too much, or has no tokens")

    def _give(self, lane: Lane, message: m.Activations, tensors: Tensors) -> None:
        if lane.run is not None and lane.run.step.step == message.step:
            lane.run.given, lane.awake = (message, tensors), True
        else:
            lane.given[message.step] = (message, tensors)

    def advance(self) -> bool:
        """Resume every lane that can go on; True if one may go on again at once."""
        for lane in self._lanes:
            if self._can_begin(lane):
                self._begin(lane, lane.queue.popleft())
            if lane.awake or _is_due(lane.run):
                self._resume(lane)
        return any(lane.awake or self._can_begin(lane) for lane in self._lanes)

    def _can_begin(self, lane: Lane) -> bool:
        """Whether a lane's next step is here with all that it begins with, but for what is passed on to it."""
        waits = self._stage != WHOLE and self._stage.is_first
        return lane.can_begin and (not waits or lane.has_drawn_for(lane.queue[0].step))

    @property
    def due(self) -> float | None:
        """When a lane can go on by itself, by `time.perf_counter`: an emulated device will have done its slice."""
        moments = [lane.run.wake_at for lane in self._lanes if lane.run is not None and lane.run.wake_at is not None]
        return min(moments, default=None)

    def idled(self, start: float, end: float) -> None:
        """No lane could go on from `start` to `end`, says whoever waits for the links. Not idle: an emulated device."""
        if self._device is not None:
            start = max(start, self._device.busy_until)
        if start >= end:
            return
        self.idle_s += end - start
        for lane in self._lanes:
            if lane.run is not None:
                lane.run.clock.idled(start, end)

    def look_at_links(self) -> None:
        """Tell the gateway that all links are up, once; or that one is gone, with which the session can't go on."""
        if self._is_over:
            return
        for link in self.links.values():
            if link.lost is not None:
                self._lose_link(link.name, link.lost)
                return
        if self._is_starting and all(link.is_up for link in self.links.values()):
            self._is_starting = False
            kinds = ", ".join(sorted({link.kind for link in self.links.values()}))
            self._reply(m.Ready(self._life, None, self._session, kinds))

    def close(self) -> None:
        """Close the links."""
        for link in self.links.values():
            link.close()
        self.links.clear()

    def _assign(self, assign: m.ComputeAssign) -> None:
        self._life = assign.life
        self.close()
        self._groups = {group.group: group for group in assign.groups}
        if assign.wire_dtype is not None:
            wire = TORCH_DTYPES[assign.wire_dtype]
            self.wire_dtype = WireDtype(self._model.dtype, wire, self.counters, strict=self._strict)
        self._start_session(assign.session)
        self._link(shard for group in assign.groups for shard in group.shards)

    def _start_session(self, session: int) -> None:
        """Forget every step: the gateway has fenced them."""
        self._session = session
        self._is_starting, self._is_over = True, False
        self._states.clear()
        self._lanes = [Lane() for _ in self._lanes]

    def _link(self, shards: Iterable[m.ShardAddress]) -> None:
        """Dial them; `look_at_links` says what comes of it."""
        for shard in shards:
            try:
                self.links[shard.name] = self._connect(shard)
            except NetError as error:
                self._lose_link(shard.name, str(error))
                return
        self.look_at_links()

    def _lose_link(self, name: str, reason: str) -> None:
        """Have this session fenced, which ends what is left of it, and another begun, which links anew."""
        self._is_over = True
        self.counters["lost_links"] += 1
        log.warning("link lost", worker=name, reason=reason)
        self._reply(m.LinkLost(self._life, self._session, name, reason))

    def _begin(self, lane: Lane, queued: QueuedStep) -> None:
        step = queued.step
        try:
            token_ids, block_tables, scored_tokens, masks = self._check_tensors(queued)
            if self._stage.is_last:
                for state in step.states:
                    self._states.put(state)
                if lacking := self._states.lacking(step.samples):
                    self._ask(lane, step, lacking)
                    return
            if self._stage.is_first:
                token_ids = self._resolve_previous(lane, step, token_ids)
            states = self._states.of(step.samples) if self._stage.is_last else ()
            inputs = Inputs(token_ids, scored_tokens, masks, states)
            groups = [(rows, self._shares(step, rows)) for rows in group_rows(step, block_tables.tolist())]
        except WireError as error:
            self._give_up(lane, step, str(error))
            return
        clock = StepClock(step.lane, step.step, time.perf_counter(), self._record)
        spans = StepSpans(self._tracer, "step", step.traces, step.step, step.lane) if step.traces else None
        lane.run = StepRun(
            self._model, step, inputs, groups, self.wire_dtype, clock, self._stage, self._pass_on, self._device, spans
        )
        lane.run.given, lane.awake = lane.given.pop(step.step, None), True
        lane.given = {number: given for number, given in lane.given.items() if number > step.step}

    def _check_tensors(self, queued: QueuedStep) -> Tensors:
        """The four parts. Raises `WireError` if they are not what the samples need."""
        step, tensors = queued.step, queued.tensors
        if len(tensors) != NUM_PARTS:
            raise WireError(f"step {step.step} has {len(tensors)} parts instead of {NUM_PARTS}")
        masks = tensors[-1]
        most = max((sample.mask for sample in step.samples), default=-1)
        if most >= 0 and (masks.ndim != 2 or most >= len(masks) or 32 * masks.shape[1] < self._model.vocab_size):
            raise WireError(f"step {step.step} has masks {list(masks.shape)}, too few for mask {most} of all tokens")
        return tensors

    def _ask(self, lane: Lane, step: m.Step, sequences: tuple[int, ...]) -> None:
        """Have the step sent again with these states; its lane waits, with what is queued behind."""
        lane.asked = step.step
        self.counters["asked_states"] += len(sequences)
        self._reply(m.NeedState(step.life, step.session, step.step, step.lane, sequences))

    def _resolve_previous(self, lane: Lane, step: m.Step, token_ids: torch.Tensor) -> torch.Tensor:
        """Token ids int64 [T] on the device, with those that the lane's last step has drawn. Raises `WireError`."""
        token_ids = token_ids.to(self._model.device, torch.int64)
        for previous in step.previous:
            if lane.drawn_tokens is None or previous.step != lane.drawn_step:
                raise WireError(f"step {step.step} needs tokens of step {previous.step}, which is not the last")
            token_ids[previous.row] = lane.drawn_tokens[previous.sample]
        return token_ids

    def _shares(self, step: m.Step, rows: GroupRows) -> list[Share]:
        if rows.group not in self._groups:
            raise WireError(f"step {step.step} names group {rows.group}, to which there is no link")
        return [
            Share(self.links[shard.name], step, rows, shard.heads, self._model.calls)
            for shard in self._groups[rows.group].shards
        ]

    def _resume(self, lane: Lane) -> None:
        assert lane.run is not None
        lane.awake = False
        clock, started = lane.run.clock, time.perf_counter()
        try:
            with self._guard:
                next(lane.run.going)
        except StopIteration as end:
            self._computed(clock, started)
            self._finish(lane, lane.run, end.value)
        except (PeerGone, WireError, CannotDraw, Converted, torch.OutOfMemoryError) as error:
            self._fail(lane, str(error))
        except torch.AcceleratorError:
            raise  # the device does nothing more for this process
        except Exception as error:
            # Only this step's requests end. Were it the process, the same step would end the next process too.
            log.exception("a step has a defect", step=lane.run.step.step)
            self._fail(lane, f"{type(error).__name__}: {error}")
        else:
            self._computed(clock, started)

    def _computed(self, clock: StepClock, started: float) -> None:
        if self._device is None:  # an emulated one says for itself when it works
            clock.computed(started, time.perf_counter())

    def _finish(self, lane: Lane, run: StepRun, outcome: Outcome | None) -> None:
        step = run.step
        lane.run = None
        if outcome is None:
            self._reply(m.StepAborted(step.life, step.session, step.step, step.lane))
            return
        if self._stage == WHOLE:
            lane.drawn_step, lane.drawn_tokens = step.step, outcome.tokens
        self.counters["steps"] += 1
        self.counters["rows"] += sum(segment.num_queries for segment in step.segments if segment.stores)
        times = run.clock.times(time.perf_counter())
        for name in self.step_seconds:
            self.step_seconds[name] += getattr(times, name)
        if run.spans is not None:
            run.spans.end({f"pannier.{name}": getattr(times, name) for name in self.step_seconds})
        frame = (step.life, step.session, step.step, step.lane)
        if self._stage.is_last:
            self._reply(m.StepDone(*frame, outcome.drawn, outcome.scored, times))
        else:
            self._reply(m.StageDone(*frame, times))

    def _abort(self, abort: m.AbortStep) -> None:
        lane = self._lanes[abort.lane]
        lane.queue = deque(queued for queued in lane.queue if queued.step.step < abort.step)
        if lane.asked is not None and lane.asked >= abort.step:
            lane.asked = None
        if lane.run is not None and lane.run.step.step == abort.step:
            lane.run.abort()
            lane.awake = True
        else:
            self._reply(m.StepAborted(abort.life, abort.session, abort.step, abort.lane))

    def _fail(self, lane: Lane, reason: str) -> None:
        assert lane.run is not None
        lane.run.going.close()
        if lane.run.spans is not None:
            lane.run.spans.end({}, reason)
        self._give_up(lane, lane.run.step, reason)

    def _give_up(self, lane: Lane, step: m.Step, reason: str) -> None:
        """Say that the step can't be done; the gateway will fence this session, which ends all that is left of it."""
        lane.run, lane.awake, lane.has_failed = None, False, True
        lane.queue.clear()
        self.counters["failed_steps"] += 1
        self._reply(m.StepFailed(step.life, step.session, step.step, step.lane, reason))


def _is_due(run: StepRun | None) -> bool:
    return run is not None and run.wake_at is not None and run.wake_at <= time.perf_counter()
