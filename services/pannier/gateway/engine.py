"""Requests in, steps out, tokens back, text to clients. Drives the scheduler; its I/O is two callbacks."""

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import count

from pannier.gateway.admission import Admission
from pannier.gateway.fleet import Fleet
from pannier.gateway.output_text import Released
from pannier.gateway.streams import Stream, Streams
from pannier.net.errors import PeerGone
from pannier.scheduler import Output, Rejected, Scheduler, Step, Unplanned
from pannier.wire import Dtype, GatewayToClient, lay_out, payload_bytes
from pannier.wire import messages as m

SendStep = Callable[[str, m.Step, bytearray], None]
SendClient = Callable[[bytes, GatewayToClient, bool], None]
"""Takes client, message, and whether it ends a request: then it must arrive, however slowly the client reads."""


class Engine:
    """Owns the scheduler and the live requests."""

    def __init__(
        self, scheduler: Scheduler, fleet: Fleet, admission: Admission, send_step: SendStep, send_client: SendClient
    ) -> None:
        self.scheduler = scheduler
        self.admission = admission
        self.streams = Streams()
        self.steps_by_lane: Counter[int] = Counter()
        self.last_times: dict[int, m.StepTimes] = {}
        self._fleet = fleet
        self._send_step = send_step
        self._send_client = send_client
        self._next_sequence = count(1)

    def generate(self, peer: bytes, message: m.Generate) -> None:
        """Admit a request, or tell its client why not."""
        if self.streams.of_request(peer, message.request) is not None:
            self._refuse(peer, message, Rejected("invalid", "request", f"request {message.request!r} is under way"))
            return
        sequence = next(self._next_sequence)
        try:
            admitted = self.admission.admit(message, sequence, self._capacity())
            self.scheduler.add(admitted.request)
        except Rejected as rejected:
            self._refuse(peer, message, rejected)
            return
        self.streams.open(
            Stream(peer, message.request, sequence, admitted.output, prompt_tokens=len(admitted.request.prompt))
        )
        self.pump()

    def cancel(self, peer: bytes, request: str) -> None:
        """Forget a request; unknown ones are fine. Its blocks return with the steps that name them."""
        stream = self.streams.of_request(peer, request)
        if stream is not None:
            self._abandon(stream)
            self.pump()

    def give_up(self, reason: str) -> None:
        """End every request with an error. Their blocks return with the steps that name them."""
        for stream in self.streams.all():
            self.scheduler.cancel(stream.sequence)
            self._end(stream, m.Failed(stream.request, "unavailable", None, reason))

    def pump(self) -> None:
        """Plan and send steps until every lane has enough of them."""
        for lane in self._fleet.open_lanes():
            while (step := self.scheduler.schedule(lane)) is not None:
                self._send(step)

    def commit(self, lane: int, done: m.StepDone) -> None:
        """A step of a lane is done: advance its sequences, stream their text, plan on.

        Raises `Unplanned`, and nothing has changed, when the lane owes no such step.
        """
        if self.scheduler.lane_of(done.step) != lane:
            raise Unplanned(f"step {done.step} is not planned on lane {lane}")
        outputs = self.scheduler.commit(done.step, done.drawn)
        self.steps_by_lane[lane] += 1
        self.last_times[lane] = done.times
        self.deliver(outputs)  # before planning: a stop string may end a sequence
        self.pump()

    def deliver(self, outputs: list[Output]) -> None:
        """Turn what sequences have drawn into text, and send it."""
        for output in outputs:
            stream = self.streams.of_sequence(output.sequence)
            if stream is not None:
                self._deliver(stream, output)

    def _capacity(self) -> int:
        """Tokens that the largest group can hold of one sequence."""
        pools = self.scheduler.pools.values()
        return max((pool.total for pool in pools), default=0) * self.scheduler.config.block_size

    def _deliver(self, stream: Stream, output: Output) -> None:
        if output.drawn is None:
            self._end(stream, m.Failed(stream.request, "unavailable", None, output.reason or "it was given up"))
            return
        released, reason = stream.output.push(output.drawn), output.finish_reason
        if reason is not None and not stream.output.stopped:
            rest = stream.output.finish()
            released = Released(released.text + rest.text, released.drawn + rest.drawn)
        if stream.output.stopped:
            reason = "stop"
            self.scheduler.finish(stream.sequence, stream.output.num_kept)
        delta = stream.delta(released, reason)
        if reason is not None and delta is not None:
            self._end(stream, delta)
        elif delta is not None:
            self._tell(stream, delta)

    def _end(self, stream: Stream, last: m.Delta | m.Failed) -> None:
        self.streams.close(stream)
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
        self.scheduler.cancel(stream.sequence)

    def _refuse(self, peer: bytes, message: m.Generate, rejected: Rejected) -> None:
        with suppress(PeerGone):  # it has left already
            self._send_client(peer, m.Failed(message.request, rejected.code, rejected.param, rejected.reason), False)

    def _send(self, step: Step) -> None:
        compute = self._fleet.computes_lane(step.lane)
        arrays = (step.token_ids, step.blocks)
        parts = lay_out((Dtype.INT32, (len(values),)) for values in arrays)
        payload = bytearray(payload_bytes(parts))
        for part, values in zip(parts, arrays, strict=True):
            payload[part.offset : part.offset + part.nbytes] = values.tobytes()
        message = m.Step(
            life=self._fleet.config.life,
            session=compute.session,
            step=step.step,
            lane=step.lane - compute.first_lane,
            segments=step.segments,
            previous=step.previous,
            samples=step.samples,
            copies=step.copies,
            states=(),
            parts=parts,
        )
        self._send_step(compute.hello.name, message, payload)
