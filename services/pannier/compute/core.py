"""The compute worker's lanes: which step runs in which, and what wakes it. No sockets, no poller."""

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import assert_never

import structlog
import torch

from pannier.compute.link import Link, Tensors
from pannier.compute.rows import GroupRows, group_rows
from pannier.compute.share import ShardFailed, Share
from pannier.compute.step_run import Outcome, StepRun
from pannier.net.errors import PeerGone
from pannier.slicer import SlicedModel
from pannier.wire import AttentionToCompute, WireError, WorkerToGatewayData
from pannier.wire import messages as m

ConnectLink = Callable[[m.ShardAddress], Link]
Reply = Callable[[WorkerToGatewayData], None]
log = structlog.get_logger()


@dataclass
class QueuedStep:
    """A step that waits for the one before it in its lane."""

    step: m.Step
    token_ids: torch.Tensor
    block_tables: list[int]


@dataclass
class Lane:
    """One micro-batch in flight: a generator that is resumed when something it waits for has arrived."""

    queue: deque[QueuedStep] = field(default_factory=deque)
    run: StepRun | None = None
    awake: bool = False
    has_failed: bool = False
    """A step was given up: what follows would read what it has not written. Until the next session."""
    drawn_step: int = 0
    drawn_tokens: torch.Tensor | None = None
    started: float = 0.0
    computed_s: float = 0.0
    idle_before_s: float = 0.0


class ComputeCore:
    """The lanes of one compute worker, its links and its session."""

    def __init__(self, model: SlicedModel, num_lanes: int, connect: ConnectLink, reply: Reply) -> None:
        self.links: dict[str, Link] = {}
        self.counters: Counter[str] = Counter()
        self.idle_s = 0.0
        """Seconds in which no lane could go on; whoever waits for the links adds to it."""
        self._model = model
        self._lanes = [Lane() for _ in range(num_lanes)]
        self._connect = connect
        self._reply = reply
        self._groups: dict[int, m.GroupAddress] = {}
        self._life = self._session = 0

    def obey(self, message: m.ComputeAssign | m.NewSession | m.Step | m.AbortStep, tensors: Tensors) -> None:
        """Do what the gateway says."""
        match message:
            case m.ComputeAssign():
                self._assign(message)
            case m.NewSession():
                self._start_session(message.session)
            case m.Step() | m.AbortStep() if (message.life, message.session) != (self._life, self._session):
                self.counters["stale_frames"] += 1
            case m.Step() if self._lanes[message.lane].has_failed:
                self.counters["stale_frames"] += 1
            case m.Step():
                self._lanes[message.lane].queue.append(QueuedStep(message, tensors[0].long(), tensors[1].tolist()))
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

    def advance(self) -> bool:
        """Resume every lane that can go on; True if one may go on again at once."""
        for lane in self._lanes:
            if lane.run is None and lane.queue:
                self._begin(lane, lane.queue.popleft())
            if lane.awake:
                self._resume(lane)
        return any(lane.awake or (lane.run is None and lane.queue) for lane in self._lanes)

    def close(self) -> None:
        """Close the links."""
        for link in self.links.values():
            link.close()
        self.links.clear()

    def _assign(self, assign: m.ComputeAssign) -> None:
        self._life = assign.life
        self.close()
        self._groups = {group.group: group for group in assign.groups}
        shards = [shard for group in assign.groups for shard in group.shards]
        self.links = {shard.name: self._connect(shard) for shard in shards}
        self._start_session(assign.session)

    def _start_session(self, session: int) -> None:
        """Forget every step: the gateway has fenced them."""
        self._session = session
        self._lanes = [Lane() for _ in self._lanes]
        kinds = ", ".join(sorted({link.kind for link in self.links.values()}))
        self._reply(m.Ready(self._life, None, session, kinds))

    def _begin(self, lane: Lane, queued: QueuedStep) -> None:
        step = queued.step
        try:
            token_ids = self._resolve_previous(lane, queued)
            groups = [(rows, self._shares(step, rows)) for rows in group_rows(step, queued.block_tables)]
        except WireError as error:
            self._give_up(lane, step, str(error))
            return
        lane.run, lane.awake = StepRun(self._model, step, token_ids, groups), True
        lane.started, lane.computed_s, lane.idle_before_s = time.perf_counter(), 0.0, self.idle_s

    def _resolve_previous(self, lane: Lane, queued: QueuedStep) -> torch.Tensor:
        """Token ids [T] on the device, those filled in that the lane's preceding step has drawn. Raises `WireError`."""
        token_ids = queued.token_ids.to(self._model.device)
        for previous in queued.step.previous:
            if lane.drawn_tokens is None or previous.step != lane.drawn_step:
                raise WireError(f"step {queued.step.step} needs tokens of step {previous.step}, which is not the last")
            token_ids[previous.row] = lane.drawn_tokens[previous.sample]
        if any(sample.state_version for sample in queued.step.samples):
            raise WireError("this compute worker draws without sampler states")
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
        started = time.perf_counter()
        try:
            next(lane.run.going)
        except StopIteration as end:
            lane.computed_s += time.perf_counter() - started
            self._finish(lane, lane.run, end.value)
        except (PeerGone, WireError, torch.OutOfMemoryError) as error:
            self._fail(lane, str(error))
        except torch.AcceleratorError:
            raise  # the device does nothing more for this process
        except Exception as error:
            # Only this step's requests end. Were it the process, the same step would end the next process too.
            log.exception("a step has a defect", step=lane.run.step.step)
            self._fail(lane, f"{type(error).__name__}: {error}")
        else:
            lane.computed_s += time.perf_counter() - started

    def _finish(self, lane: Lane, run: StepRun, outcome: Outcome | None) -> None:
        step = run.step
        lane.run = None
        if outcome is None:
            self._reply(m.StepAborted(step.life, step.session, step.step, step.lane))
            return
        lane.drawn_step, lane.drawn_tokens = step.step, outcome.tokens
        self.counters["steps"] += 1
        self.counters["rows"] += sum(segment.num_queries for segment in step.segments if segment.stores)
        self._reply(m.StepDone(step.life, step.session, step.step, step.lane, outcome.drawn, self._times(lane, run)))

    def _times(self, lane: Lane, run: StepRun) -> m.StepTimes:
        return m.StepTimes(
            compute_s=lane.computed_s,
            attention_s=max(share.attention_s for share in run.shares.values()),
            exposed_s=self.idle_s - lane.idle_before_s,
            total_s=time.perf_counter() - lane.started,
        )

    def _abort(self, abort: m.AbortStep) -> None:
        lane = self._lanes[abort.lane]
        lane.queue = deque(queued for queued in lane.queue if queued.step.step < abort.step)
        if lane.run is not None and lane.run.step.step == abort.step:
            lane.run.abort()
            lane.awake = True
        else:
            self._reply(m.StepAborted(abort.life, abort.session, abort.step, abort.lane))

    def _fail(self, lane: Lane, reason: str) -> None:
        assert lane.run is not None
        lane.run.going.close()
        self._give_up(lane, lane.run.step, reason)

    def _give_up(self, lane: Lane, step: m.Step, reason: str) -> None:
        """Say that the step can't be done; the gateway will fence this session, which ends all that is left of it."""
        lane.run, lane.awake, lane.has_failed = None, False, True
        lane.queue.clear()
        self.counters["failed_steps"] += 1
        self._reply(m.StepFailed(step.life, step.session, step.step, step.lane, reason))
