"""The compute worker's step thread: blocking code that owns every data socket and resumes whichever lane is ready."""

import time
from pathlib import Path

import structlog
import torch
import zmq

from pannier.compute.core import ComputeCore
from pannier.compute.emulated_device import EmulatedDevice, EmulatedModel, StepTime
from pannier.compute.link import InProcessLink, Link, LocalAttention
from pannier.compute.link_choice import LinkChoice
from pannier.compute.stage_link import StageLink
from pannier.compute.timeline import Timeline
from pannier.net import SocketOptions, connect
from pannier.net.outbox import Outbox
from pannier.net.shm import SPIN_US, Waiting
from pannier.runtime.alarm import Alarm
from pannier.runtime.config import LinkKind
from pannier.runtime.threads import StopSignal
from pannier.runtime.tracing import Tracer
from pannier.slicer import WHOLE, SlicedModel, Stage
from pannier.wire import Decoder, GatewayToWorkerData, WireError, WorkerToGatewayData, encode
from pannier.wire import messages as m
from pannier.wire.tensors import unpack
from pannier.wire.traffic import Traffic

RETRY_MS = 2
"""How soon a full queue is tried again."""
log = structlog.get_logger()


class ComputeWorker:
    """The sockets around a `ComputeCore`. `loop` is the step thread."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        name: str,
        model: SlicedModel,
        num_lanes: int,
        options: SocketOptions,
        local: LocalAttention | None = None,
        link: LinkKind = "auto",
        spin_us: int = SPIN_US,
        flows: int = 1,
        link_options: SocketOptions | None = None,
        *,
        stage: Stage = WHOLE,
        stage_link: StageLink | None = None,
        step_time: StepTime | None = None,
        timeline: Path | None = None,
        strict: bool = False,
        tracer: Tracer | None = None,
    ) -> None:
        """With `step_time` the device is emulated, and takes so long."""
        self._timeline, self._timeline_path = Timeline(), timeline
        record = None if timeline is None else self._timeline.record
        device = None
        if step_time is not None:
            model, device = EmulatedModel(model), EmulatedDevice(step_time, len(model.calls) + 1)
        self.core = ComputeCore(
            model,
            num_lanes,
            self._connect_link,
            self._reply,
            stage=stage,
            pass_on=None if stage_link is None else stage_link.send,
            device=device,
            record=record,
            strict=strict,
            tracer=tracer,
        )
        self._stage_link = stage_link
        self._waiting = Waiting(spin_us)
        self._traffic = Traffic()
        self._links = LinkChoice(
            context, self._waiting, name, model, num_lanes, link, flows, link_options or options, self._traffic
        )
        self._context = context
        self._name = name
        self._options = options
        self._local = local
        self._decoder: Decoder[GatewayToWorkerData] = Decoder(GatewayToWorkerData)

    def join(self, welcome: m.Welcome) -> None:
        """Dial the gateway that has welcomed this worker."""
        self._gateway = connect(
            self._context, zmq.DEALER, welcome.data_endpoint, self._options, identity=self._name.encode()
        )
        self._to_gateway = Outbox(lambda frames: self._gateway.send_multipart(frames, zmq.NOBLOCK, copy=False))
        self._reply(m.Join(welcome.life))

    def loop(self, stop: StopSignal) -> None:
        """Run steps until told to stop; closes what `join` opened."""
        self._waiting.register(self._gateway)
        self._waiting.register(stop)
        self._alarm = Alarm()
        self._waiting.register(self._alarm)
        if self._stage_link is not None:
            self._waiting.register(self._stage_link.socket)
        try:
            with torch.inference_mode():
                while not stop.is_set():
                    can_go_on = self.core.advance()
                    # Before waiting: answers on a link within this process are there at once and wake no poller.
                    received = self._receive_from_links() | self._receive_from_stage()
                    self._wait(can_go_on or received)
                    self._receive_from_gateway()
        finally:
            self.core.close()
            self._alarm.close()
            self._gateway.close()
            if self._timeline_path is not None:
                self._timeline.write(self._timeline_path, self._name)

    def counters(self) -> dict[str, float]:
        """What the gateway shows of this worker."""
        local = self._local.counters if self._local is not None else {}
        seconds = {**self.core.step_seconds, "idle_s": self.core.idle_s}
        counts = {**local, **self.core.counters, **self._traffic.counters(), **seconds}
        return {name: float(count) for name, count in counts.items()}

    def close(self) -> None:
        """Close what is open outside `loop`: where the stage before this one comes in."""
        if self._stage_link is not None:
            self._stage_link.close()

    def _wait(self, can_go_on: bool) -> None:
        """Wait until something arrives, unless a lane can go on without; the time counts as idle."""
        flushed = [link.flush() for link in self.core.links.values()]
        self.core.look_at_links()
        flushed.append(self._to_gateway.flush())
        if self._stage_link is not None:
            flushed.append(self._stage_link.flush())
        if can_go_on:
            return
        self._alarm.set(self.core.due)
        started = time.perf_counter()
        self._waiting.wait(None if all(flushed) else RETRY_MS)
        self.core.idled(started, time.perf_counter())

    def _receive_from_links(self) -> bool:
        """Hand on every answer that is there; whether there was one. What is not a message is counted and dropped."""
        any_received = False
        for link in list(self.core.links.values()):
            while True:
                try:
                    received = link.receive()
                except WireError:
                    self.core.counters["refused_frames"] += 1
                    continue
                if received is None:
                    break
                self.core.receive(link, *received)
                any_received = True
        return any_received

    def _receive_from_stage(self) -> bool:
        """Hand on what other stages have sent; whether anything was there. What is not a message is counted."""
        if self._stage_link is None:
            return False
        any_received = False
        while True:
            try:
                received = self._stage_link.receive()
                if received is None:
                    return any_received
                self.core.receive_from_stage(*received)
            except WireError:
                self.core.counters["refused_frames"] += 1
            any_received = True

    def _receive_from_gateway(self) -> None:
        while True:
            try:
                frames = self._gateway.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            message, payload = self._decoder.decode([frame.buffer for frame in frames])
            self._obey(message, payload)

    def _obey(self, message: GatewayToWorkerData, payload: memoryview) -> None:
        match message:
            case m.AttentionAssign() if self._local is not None:
                self._local.assign(message)
                self._reply(m.Ready(message.life, message.group, 0, "in-process"))
            case m.Fence() if self._local is not None:
                self._reply(self._local.fence(message))
            case m.AttentionAssign() | m.Fence():
                raise WireError("this compute worker holds no KV blocks")
            case m.ComputeAssign():
                self._assign = message
                if self._stage_link is not None and message.next_stage is not None:
                    self._stage_link.dial(message.next_stage)
                self.core.obey(message, [])
            case _:
                self.core.obey(message, unpack(getattr(message, "parts", ()), payload))

    def _reply(self, message: WorkerToGatewayData) -> None:
        self._to_gateway.put(encode(message))

    def _connect_link(self, address: m.ShardAddress) -> Link:
        if not address.endpoint:
            if self._local is None:
                raise WireError("a link within this process needs attention in it")
            return InProcessLink(self._name, address.name, self._local)
        link, reason = self._links.connect(address, self._assign, self.core.wire_dtype.itemsize)
        log.info("link", worker=address.name, kind=link.kind, reason=reason)
        return link
