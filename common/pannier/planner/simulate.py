"""Requests through the real scheduler, with a clock where the workers would be: a discrete-event simulation.

A step works on its replica's compute device, then on all the groups that it names, then waits for the link; each device
serves one step after the other, in the order they come. So while one lane is in attention the other computes, and two
equal lanes settle at max(T_m, T_a, (T_m + T_a + T_c) / 2) a step, one at the sum, as DESIGN 6 says. In truth a step
goes through the devices once for each call; in their order at each device, and so in the time that a cycle takes, the
many short turns are the same as one long one.

Nothing here happens once a token: what there is to do is per step, or per request.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from typing import Any

from pannier.planner.cost import Clock, StepTime, work_of
from pannier.planner.prompts import DRAWN_TOKEN, make_prompt
from pannier.planner.result import Recorder, SimulationResult
from pannier.planner.setup import Setup
from pannier.planner.trace import TraceRequest
from pannier.scheduler import Output, Rejected, Request, Scheduler, Step
from pannier.wire.messages import Drawn


class Stalled(RuntimeError):
    """Requests are left, and nothing will happen any more: a bug in the scheduler, or here."""


def simulate(requests: Iterable[TraceRequest], setup: Setup, clock: Clock) -> SimulationResult:
    """Replay the requests to the last token. The same requests, set-up and clock give the same result."""
    return _Simulation(requests, setup, clock).run()


@dataclass(slots=True)
class _Device:
    """Serves one after the other, whoever comes first."""

    free_s: float = 0.0
    """When it has done all that it was given."""
    busy_s: float = 0.0

    def serve(self, now: float, seconds: float) -> float:
        """When work that comes now and takes `seconds` is done."""
        self.busy_s += seconds
        self.free_s = max(self.free_s, now) + seconds
        return self.free_s


@dataclass(slots=True)
class _Lane:
    """Its planned steps, of which the first runs, and how long that one takes."""

    number: int
    compute: _Device
    planned: deque[Step] = field(default_factory=deque)
    running: StepTime | None = None


@dataclass(slots=True)
class _Live:
    """A request that has come and is not done."""

    number: int
    arrival_s: float
    request: TraceRequest
    first_token_s: float | None = None


class _Simulation:
    """One run."""

    def __init__(self, requests: Iterable[TraceRequest], setup: Setup, clock: Clock) -> None:
        self._setup = setup
        self._clock = clock
        self._config = setup.scheduler_config()
        self._scheduler = Scheduler(self._config)
        for group, num_blocks in enumerate(setup.groups):
            self._scheduler.add_group(group, num_blocks)
        self._pools = list(self._scheduler.pools.values())
        self._groups = [_Device() for _ in setup.groups]
        self._replicas = [_Device() for _ in range(setup.replicas)]
        self._open: dict[int, _Lane] = {}  # lanes that may plan a further step
        for number in range(setup.replicas * setup.lanes):
            self._scheduler.add_lane(number)
            self._open[number] = _Lane(number, self._replicas[number // setup.lanes])

        self._trace = enumerate(requests)
        self._live: dict[int, _Live] = {}
        self._backlog: OrderedDict[int, _Live] = OrderedDict()  # live, and the scheduler doesn't know of them yet
        self._unstarted: OrderedDict[int, _Live] = OrderedDict()  # live, and wait in the scheduler for the first time

        self._events: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._num_events = 0  # of two events at one time the older comes first
        self._num_plans = 0
        self._now = self._end_s = 0.0
        self._record = Recorder()

    def run(self) -> SimulationResult:
        """Let everything happen."""
        self._expect_arrival()
        start_s = self._end_s = self._record.last_look_s = self._events[0][0] if self._events else 0.0
        while self._events:
            self._now, _, happen, subject = heappop(self._events)
            happen(subject)
        if self._live:
            raise Stalled(f"{self._scheduler.num_running} run, {self._scheduler.num_waiting} wait, and no step is left")
        seconds = self._end_s - start_s
        shares = (_busy_share(devices, seconds) for devices in (self._replicas, self._groups))
        return self._record.result(seconds, sum(pool.total for pool in self._pools), *shares)

    def _at(self, when: float, happen: Callable[[Any], None], subject: Any) -> None:
        heappush(self._events, (when, self._num_events, happen, subject))
        self._num_events += 1

    # --- requests come and go --------------------------------------------------------------------------------------

    def _expect_arrival(self) -> None:
        """Read the next request of the trace; when they come one at a time it comes now."""
        if (numbered := next(self._trace, None)) is not None:
            number, request = numbered
            when = self._now if self._setup.one_at_a_time else request.arrival_s
            self._at(when, self._arrive, _Live(number, when, request))

    def _arrive(self, live: _Live) -> None:
        if not self._setup.one_at_a_time:
            self._expect_arrival()
        self._live[live.number] = live
        if self._setup.patience_s < inf:
            self._at(live.arrival_s + self._setup.patience_s, self._lose_patience, live)
        if self._setup.max_waiting is None:
            self._backlog[live.number] = live
        else:
            self._add(live)
        self._plan()

    def _add(self, live: _Live) -> None:
        """Hand a request to the scheduler. Only now it gets a prompt: a long queue would be gigabytes of them."""
        prompt = make_prompt(live.request, live.number)
        try:
            self._scheduler.add(Request(sequences=(live.number,), prompt=prompt, max_tokens=live.request.output_length))
            self._unstarted[live.number] = live
        except Rejected as rejected:
            self._record.refused[rejected.code] += 1
            self._leave(live)

    def _lose_patience(self, live: _Live) -> None:
        if live.number not in self._live or live.first_token_s is not None:
            return
        self._scheduler.cancel(live.number)
        self._record.given_up += 1
        self._leave(live)
        self._plan()

    def _leave(self, live: _Live) -> None:
        self._end_s = self._now
        del self._live[live.number]
        self._backlog.pop(live.number, None)
        self._unstarted.pop(live.number, None)
        if self._setup.one_at_a_time:
            self._expect_arrival()

    # --- steps are planned -----------------------------------------------------------------------------------------

    def _plan(self) -> None:
        """Something has changed for the scheduler: any lane that has room may now have something to do."""
        scheduler, record = self._scheduler, self._record
        self._feed()
        for lane in list(self._open.values()):
            self._plan_lane(lane)
            if self._backlog:
                self._feed()
        record.saw_queue(scheduler.num_running, len(self._backlog) + scheduler.num_waiting)
        self._num_plans += 1
        if self._num_plans % len(self._pools) == 0:  # of many groups less often: counting them would take the most time
            record.saw_blocks(self._now, sum(pool.used for pool in self._pools))
        record.preemptions += len(scheduler.take_preemptions())

    def _feed(self) -> None:
        """Fill the scheduler's queue from the backlog."""
        while self._backlog and self._scheduler.num_waiting < self._config.max_waiting:
            self._add(self._backlog.popitem(last=False)[1])

    def _plan_lane(self, lane: _Lane) -> None:
        while len(lane.planned) < self._config.plan_ahead:
            step = self._scheduler.schedule(lane.number)
            self._note_started()
            if step is None:
                return
            lane.planned.append(step)
            if lane.running is None:
                self._begin(lane)
        del self._open[lane.number]

    def _note_started(self) -> None:
        """See who has got blocks for the first time: they start in their order, and after whoever was preempted.

        So when fewer wait than have never run, the first of these have started.
        """
        while len(self._unstarted) > self._scheduler.num_waiting:
            _, live = self._unstarted.popitem(last=False)
            self._record.queueing_s.append(self._now - live.arrival_s)

    # --- steps run -------------------------------------------------------------------------------------------------

    def _begin(self, lane: _Lane) -> None:
        step = lane.planned[0]
        self._record.saw_step(len(step.segments), len(step.token_ids))
        lane.running = self._clock.step_time(work_of(step))
        self._at(lane.compute.serve(self._now, lane.running.compute_s), self._attend, lane)

    def _attend(self, lane: _Lane) -> None:
        assert lane.running is not None
        done_s = self._now
        for group, seconds in lane.running.attention_s.items():
            done_s = max(done_s, self._groups[group].serve(self._now, seconds))
        self._at(done_s + lane.running.transfer_s, self._commit, lane)

    def _commit(self, lane: _Lane) -> None:
        step = lane.planned.popleft()
        lane.running = None
        self._open[lane.number] = lane
        self._end_s = self._now  # even if all that it drew for has been cancelled
        drawn = [Drawn(sample.sequence, DRAWN_TOKEN, None, ()) for sample in step.samples]
        outputs = self._scheduler.commit(step.step, drawn)
        self._record.output_tokens += len(outputs)
        for output in outputs:
            live = self._live[output.sequence]
            if live.first_token_s is None:
                live.first_token_s = self._now
                self._record.ttft_s.append(self._now - live.arrival_s)
            if output.finish_reason is not None:
                self._finish(live, output)
        if lane.planned:
            self._begin(lane)
        self._plan()

    def _finish(self, live: _Live, output: Output) -> None:
        record, request = self._record, live.request
        record.requests += 1
        record.prompt_tokens += request.prompt_length
        record.cached_tokens += output.num_cached
        num_outputs = min(request.output_length, self._config.max_model_len - request.prompt_length)
        if num_outputs > 1:
            assert live.first_token_s is not None
            record.tpot_s.append((self._now - live.first_token_s) / (num_outputs - 1))
        self._leave(live)


def _busy_share(devices: list[_Device], seconds: float) -> float:
    return sum(device.busy_s for device in devices) / (len(devices) * seconds) if seconds else 0.0
