"""Requests in, steps out, tokens back, text to clients. Drives the scheduler; its I/O is two callbacks."""

import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import count, islice
from math import inf

import structlog

from pannier.gateway.admission import Admission
from pannier.gateway.fleet import Fleet
from pannier.gateway.output_text import Released
from pannier.gateway.request_span import RequestSpan
from pannier.gateway.shortage import Shortage
from pannier.gateway.step_message import step_message
from pannier.gateway.streams import Stream, Streams
from pannier.net.errors import PeerGone
from pannier.runtime.tracing import Tracer
from pannier.scheduler import Inconsistent, Output, Rejected, Scheduler, Step, Unplanned
from pannier.wire import GatewayToClient
from pannier.wire import messages as m

SendStep = Callable[[str, m.Step, bytearray], None]
SendClient = Callable[[bytes, GatewayToClient, bool], None]
"""Takes client, message, and whether it ends a request: then it must arrive, however slowly the client reads."""
log = structlog.get_logger()


class Engine:
    """Owns the scheduler and the live requests."""

    def __init__(
        self,
        scheduler: Scheduler,
        fleet: Fleet,
        admission: Admission,
        send_step: SendStep,
        send_client: SendClient,
        clock: Callable[[], float] = time.monotonic,
        tracer: Tracer | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.admission = admission
        self.streams = Streams()
        self.shortage = Shortage()
        self.accounting_errors = 0
        """Times that the scheduler's books didn't balance when nothing was left to do."""
        self.steps_by_lane: Counter[int] = Counter()
        self.last_times: dict[int, m.StepTimes] = {}
        self.seconds_by_lane: dict[int, dict[str, float]] = {}
        """Sums of the times of a lane's steps."""
        self._fleet = fleet
        self._send_step = send_step
        self._send_client = send_client
        self._clock = clock
        self._tracer = tracer
        self._next_sequence = count(1)
        self._is_checked = True

    # --- requests --------------------------------------------------------------------------------------------------

    def generate(self, peer: bytes, message: m.Generate, prompt: tuple[int, ...] | None = None) -> None:
        """Admit a request, or tell its client why not. `prompt`: what `Admission.read` gave for it, if it was asked."""
        if self.streams.of_request(peer, message.request) is not None:
            self.refuse(peer, message, Rejected("invalid", "request", f"request {message.request!r} is under way"))
            return
        try:
            self._admit(peer, message, self.admission.read(message) if prompt is None else prompt)
        except Rejected as rejected:
            self.refuse(peer, message, rejected)
        else:
            self.pump()

    def refuse(self, peer: bytes, message: m.Generate, rejected: Rejected) -> None:
        """Tell a client why its request is not admitted."""
        with suppress(PeerGone):  # it has left already
            self._send_client(peer, m.Failed(message.request, rejected.code, rejected.param, rejected.reason), False)

    def cancel(self, peer: bytes, request: str) -> None:
        """Forget a request; unknown ones are fine. Its blocks return with the steps that name them."""
        stream = self.streams.of_request(peer, request)
        if stream is not None:
            self._abandon(stream)
            self.pump()

    def give_up(self, reason: str) -> None:
        """End every request with an error. Their blocks return with the steps that name them."""
        for stream in self.streams.all():
            self._fail(stream, "unavailable", reason)

    def _admit(self, peer: bytes, message: m.Generate, prompt: tuple[int, ...]) -> None:
        sequences = tuple(islice(self._next_sequence, message.params.n))
        admitted = self.admission.admit(
            message, prompt, sequences=sequences, capacity=self._capacity(), now=self._clock()
        )
        request = admitted.request
        self.scheduler.add(request)
        span = RequestSpan.begin(self._tracer, message)
        self.streams.open(
            Stream(peer, message.request, sequences, admitted.outputs, len(request.prompt), request.deadline, span)
        )
        self._is_checked = False

    def _capacity(self) -> int:
        """Tokens that the groups can hold of one sequence, which may be spread over all of them."""
        return sum(pool.total for pool in self.scheduler.pools.values()) * self.scheduler.config.block_size

    # --- steps -----------------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Plan and send steps until every lane has enough of them."""
        for lane in self._fleet.open_lanes():
            while (step := self.scheduler.schedule(lane)) is not None:
                self._send(step, self._fleet.session_of(lane).names)
        if preempted := self.scheduler.take_preemptions():
            streams = map(self.streams.of_sequence, preempted)
            self.shortage.note("one that has ended" if stream is None else stream.request for stream in streams)
        if not self._is_checked and self.scheduler.is_idle:
            self._check()

    def commit(self, lane: int, done: m.StepDone) -> None:
        """A step of a lane is done: advance its sequences, stream their text, plan on.

        Whose constraint allows nothing any more ends with an error: it is the request's, and would come again.
        Raises `Unplanned`, and nothing has changed, when the lane owes no such step.
        """
        self.require_owed(lane, done.step)
        outputs = self.scheduler.commit(done.step, done.drawn, done.scored)
        self.steps_by_lane[lane] += 1
        self._note_times(lane, done.times)
        self.deliver(outputs, code="invalid")  # before planning: a stop string may end a sequence
        self.pump()

    def send_states(self, lane: int, need: m.NeedState) -> None:
        """A compute worker lacks what its sampler needs of the past: send the step again, with it.

        Raises `Unplanned` when the lane doesn't owe that step next.
        """
        self.require_owed(lane, need.step)
        step = self.scheduler.step_with_states(need.step)
        self._send(step, self._fleet.session_of(lane).names[-1:])

    def _note_times(self, lane: int, times: m.StepTimes) -> None:
        self.last_times[lane] = times
        sums = self.seconds_by_lane.setdefault(lane, dict.fromkeys(times.__struct_fields__, 0.0))
        for name in sums:
            sums[name] += getattr(times, name)

    def require_owed(self, lane: int, step: int) -> None:
        """Raises `Unplanned` if the lane owes no such step."""
        if self.scheduler.lane_of(step) != lane:
            raise Unplanned(f"step {step} is not planned on lane {lane}")

    def _send(self, step: Step, names: Iterable[str]) -> None:
        """To those of a session's workers: to all stages, but for what only the last one asks for."""
        session = self._fleet.session_of(step.lane)
        life, number = self._fleet.config.life, session.number
        message, payload = step_message(
            step, life=life, session=number, first_lane=session.first_lane, traces=self._traces(step)
        )
        for name in names:
            self._send_step(name, message, payload)

    def _traces(self, step: Step) -> tuple[str, ...]:
        """What a step is called in the traces of its requests."""
        if self._tracer is None:
            return ()
        streams = {self.streams.of_sequence(sequence) for sequence in self.scheduler.sequences_of(step.step)}
        names = [stream.span.step() for stream in streams if stream is not None and stream.span is not None]
        return tuple(name for name in names if name is not None)

    # --- now and then ----------------------------------------------------------------------------------------------

    def expire(self) -> None:
        """End the requests whose deadline has passed."""
        if any(stream.deadline < inf for stream in self.streams.all()):
            self.deliver(self.scheduler.expire(self._clock()), code="timeout")
            self.pump()

    def report_shortage(self) -> None:
        """Say, once in a while, that sequences had to be preempted."""
        self.shortage.report(self._clock())

    def _check(self) -> None:
        """Nothing is left to do: a good moment to see whether every block has come back."""
        self._is_checked = True
        try:
            self.scheduler.check()
        except Inconsistent as error:
            self.accounting_errors += 1
            log.error("the books of the scheduler don't balance", reason=str(error))

    # --- answers ---------------------------------------------------------------------------------------------------

    def deliver(self, outputs: Iterable[Output], *, code: str = "unavailable") -> None:
        """Turn what sequences have drawn into text, and send it. Errors among the outputs have this code."""
        for output in outputs:
            stream = self.streams.of_sequence(output.sequence)
            if stream is None:
                continue
            if output.finish_reason == "error":
                self._fail(stream, code, output.reason or "it was given up")
            else:
                self._deliver(stream, output)

    def _deliver(self, stream: Stream, output: Output) -> None:
        text, reason = stream.text_of(output.sequence), output.finish_reason
        if stream.span is not None and output.drawn is not None:
            stream.span.drew()
        released = Released() if output.drawn is None else text.push(output.drawn, is_stop_token=reason == "stop")
        if reason is not None and not text.stopped:
            released += text.finish()
        if text.stopped:
            reason = "stop"
            self.scheduler.finish(output.sequence)
        delta = stream.delta(output, released, reason)
        if delta is not None and delta.usage is not None:
            self._end(stream, delta)
        elif delta is not None:
            self._tell(stream, delta)

    def _fail(self, stream: Stream, code: str, reason: str) -> None:
        """End all of a request with one error, also where only one of its outputs has come to it."""
        for sequence in stream.unfinished:
            self.scheduler.cancel(sequence)
        self._end(stream, m.Failed(stream.request, code, None, reason))

    def _end(self, stream: Stream, last: m.Delta | m.Failed) -> None:
        self.streams.close(stream)
        if stream.span is not None:
            reason = last.reason if isinstance(last, m.Failed) else None
            stream.span.end(stream.num_prompt, stream.num_sent, reason)
        self._tell(stream, last, is_end=True)

    def _tell(self, stream: Stream, message: m.Delta | m.Failed, *, is_end: bool = False) -> None:
        try:
            self._send_client(stream.peer, message, is_end)
        except PeerGone as gone:
            self._hang_up(stream.peer, str(gone))

    def _hang_up(self, peer: bytes, reason: str) -> None:
        """End all requests of a client that has left, or hardly reads: in that case it finds out in the end."""
        for stream in self.streams.of_peer(peer):
            self._abandon(stream)
            with suppress(PeerGone):
                self._send_client(peer, m.Failed(stream.request, "unavailable", None, reason), True)

    def _abandon(self, stream: Stream) -> None:
        self.streams.close(stream)
        if stream.span is not None:
            stream.span.end(stream.num_prompt, stream.num_sent, "its client has left")
        for sequence in stream.unfinished:
            self.scheduler.cancel(sequence)
