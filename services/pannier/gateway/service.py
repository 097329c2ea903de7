"""The gateway as a process: three sockets around an engine.

`control` knows who is there, `data` carries steps, `clients` carries requests. Each has one task that receives.
"""

import asyncio
import secrets
from typing import TypeAlias

import structlog
import zmq.asyncio

from pannier.gateway.admission import Admission
from pannier.gateway.engine import Engine
from pannier.gateway.entries import ComputeEntry, Session, Standing
from pannier.gateway.fleet import Fleet, FleetConfig
from pannier.gateway.guides import Guides
from pannier.gateway.intake import Intake
from pannier.gateway.patience import Patience
from pannier.gateway.registry import Registry
from pannier.gateway.sessions import Sessions
from pannier.gateway.status import status
from pannier.gateway.text import Text
from pannier.gateway.token_text import TokenText
from pannier.net import PeerGone, Server
from pannier.runtime.config import GatewayConfig
from pannier.runtime.encryption import gateway_sockets
from pannier.runtime.model_source import resolve
from pannier.runtime.service import in_thread, run_service
from pannier.runtime.tasks import first_end
from pannier.runtime.tracing import Tracer, open_tracer
from pannier.scheduler import Output, Scheduler, SchedulerConfig, Unplanned
from pannier.wire import (
    Buffer,
    ClientToGateway,
    Dtype,
    GatewayToClient,
    GatewayToWorkerData,
    WorkerToGateway,
    WorkerToGatewayData,
)
from pannier.wire import messages as m

SILENT_AFTER = 10
"""Heartbeats that may be missing before a worker counts as lost."""
GIVE_UP_AFTER = 300
"""Heartbeats after which requests end with an error: a lane's step is not done, or no lane is there to do any."""
DEADLINE_S = 0.1
"""Time between two looks at the deadlines of requests."""
GOODBYE_S = 0.02
KV_DTYPES = {
    "auto": None,
    "float32": Dtype.FLOAT32,
    "bfloat16": Dtype.BFLOAT16,
    "float16": Dtype.FLOAT16,
    "int8": Dtype.INT8,
    "fp8": Dtype.FLOAT8_E4M3,
}
FromStep: TypeAlias = m.StepDone | m.StageDone | m.StepFailed | m.NeedState | m.StepAborted
log = structlog.get_logger()


def run(config: GatewayConfig) -> int:
    """Serve until told to stop; the process's exit code."""
    return run_service(GatewayService(config))


class GatewayService:
    """The sockets of one gateway and what moves between them."""

    role = name = "gateway"

    def __init__(self, config: GatewayConfig) -> None:
        self.config = config
        self.life = secrets.randbits(62)
        self.engine: Engine | None = None
        self.intake = Intake(self._engine, config.max_waiting)
        self.draining = False
        self.stale_frames = 0
        self.refused_handshakes = 0
        self._context = zmq.asyncio.Context()
        self._text: Text | None = None
        self._tracer: Tracer | None = None
        self._for_steps: Patience[int] = Patience(GIVE_UP_AFTER)
        self._for_lanes: Patience[str] = Patience(GIVE_UP_AFTER)
        self._untold: set[str] = set()
        """Workers to which a message on the data channel was lost."""
        self._answering: set[asyncio.Task[None]] = set()

    async def startup(self) -> None:
        """Bind, then load the tokenizer. Raises `ModelError`, `BadKeys`, `PortBusy`, `Exposed`."""
        config = self.config
        self._tracer = open_tracer(self.role, self.name, config.otlp_endpoint)
        control, data, clients = gateway_sockets(config)
        self.control: Server[WorkerToGateway] = Server(self._context, WorkerToGateway, config.control_endpoint, control)
        self.data: Server[WorkerToGatewayData] = Server(self._context, WorkerToGatewayData, config.data_endpoint, data)
        self.clients: Server[ClientToGateway] = Server(self._context, ClientToGateway, config.client_endpoint, clients)
        source = resolve(config.model, weights=False)
        if source.path is not None:
            self._text = await in_thread(Text.load, source.path)
        self._token_text = TokenText(self._text)
        self.fleet = Fleet(
            FleetConfig(
                life=self.life,
                model=source.name,
                digest=source.digest,
                compute_workers=config.compute_workers,
                attention_workers=config.attention_workers,
                block_size=config.block_size,
                kv_dtype=KV_DTYPES[config.kv_dtype],
                heads_split=config.heads_split,
                max_batch_tokens=config.max_batch_tokens,
            )
        )
        self.sessions = Sessions(self.fleet, lambda: self._engine().scheduler, self._tell, self._deliver)
        welcome = m.Welcome(self.life, self.data.endpoint, config.heartbeat_s)
        self.registry = Registry(self.fleet, self.sessions, welcome, self._say, self._accepted)
        log.info("listening", clients=self.clients.endpoint, control=self.control.endpoint, data=self.data.endpoint)

    async def run(self) -> None:
        """Serve until cancelled."""
        await first_end(
            self._serve_control(),
            self._serve_data(),
            self._serve_clients(),
            self.intake.run(),
            self._watch(),
            self._watch_deadlines(),
        )

    async def drain(self) -> None:
        """Refuse new requests and wait for those that are there."""
        self.draining = True
        await self.intake.until_empty()
        if self.engine is not None:
            await self.engine.streams.until_empty()

    async def close(self) -> None:
        """Say goodbye to the workers and close every socket."""
        for task in self._answering:
            task.cancel()
        if hasattr(self, "fleet"):
            for name in {*self.fleet.compute, *self.fleet.attention}:
                self._say(name.encode(), m.Goodbye("the gateway stops"))
            await asyncio.sleep(GOODBYE_S)  # sockets drop what they hold when closed
        for server in ("control", "data", "clients"):
            if hasattr(self, server):
                await getattr(self, server).close()
        if self._tracer is not None:
            await in_thread(self._tracer.close)
        self._context.term()

    # --- what arrives ----------------------------------------------------------------------------------------------

    async def _serve_control(self) -> None:
        async for peer, message, _ in self.control:
            name = peer.decode(errors="replace")
            match message:
                case m.Hello():
                    self.registry.hello(peer, message)
                case m.Heartbeat():
                    self.registry.heartbeat(peer, message)
                case m.Goodbye():
                    self.sessions.lost(name, message.reason, leaves=True)
                    self._say(peer, m.Goodbye("as you wish"))
                    self._pump()

    async def _serve_data(self) -> None:
        async for peer, message, _ in self.data:
            name = peer.decode(errors="replace")
            if message.life != self.life or not self.fleet.knows(name):
                self.stale_frames += 1
                log.warning("stale message", worker=name, kind=type(message).__name__)
                continue
            self._from_worker(name, message)
            self._pump()

    def _from_worker(self, name: str, message: WorkerToGatewayData) -> None:
        match message:
            case m.Join():
                self.sessions.joined(name)
            case m.Ready():
                self.sessions.ready(name, message)
            case m.Fenced():
                self.sessions.fenced(name, message)
            case m.LinkLost():
                self._link_lost(name, message)
            case _:
                self._from_step(name, message)

    def _link_lost(self, name: str, lost: m.LinkLost) -> None:
        """A compute worker that can't reach an attention worker is given up, and with the last one all requests."""
        if self.sessions.link_lost(name, lost):
            return
        reason = f"{name} can't reach {lost.worker} ({lost.reason})"
        self.registry.give_up(name, reason)
        if not self.fleet.takes_requests():
            self._engine().give_up(reason)

    def _from_step(self, name: str, message: FromStep) -> None:
        compute = self.fleet.compute.get(name)
        session = compute.session if compute is not None else None
        if (
            compute is None
            or session is None
            or (session.standing, session.number) != (Standing.READY, message.session)
        ):
            log.info("a step of an ended session", worker=name, step=message.step)
            return
        match message:
            case m.StepDone() | m.StageDone():
                self._done(compute, session, message)
            case m.StepFailed():
                log.error("step failed", worker=name, step=message.step, reason=message.reason)
                self.sessions.failed(session, message)
            case m.NeedState():
                self._send_states(session, message)
            case m.StepAborted():
                log.warning("unexpected", worker=name, kind=type(message).__name__)

    def _done(self, compute: ComputeEntry, session: Session, done: m.StepDone | m.StageDone) -> None:
        """A stage is done with a step; with the last of them the step is.

        One that its lane doesn't owe, or with other draws, ends the session like a failed step.
        """
        lane = session.first_lane + done.lane
        try:
            self._engine().require_owed(lane, done.step)
            if isinstance(done, m.StepDone) != (compute is session.workers[-1]):
                raise Unplanned(f"{compute.hello.name} says {type(done).__name__}, which is another stage's to say")
            if (step := session.collect(compute, done)) is not None:
                self._engine().commit(lane, step)
        except Unplanned as error:
            self._refuse_step(session, done, str(error))

    def _send_states(self, session: Session, need: m.NeedState) -> None:
        """A step lacks the past of its sequences. Asking for what is not in it ends the session like a failed step."""
        try:
            self._engine().send_states(session.first_lane + need.lane, need)
        except Unplanned as error:
            self._refuse_step(session, need, str(error))

    def _refuse_step(self, session: Session, said: m.StepDone | m.StageDone | m.NeedState, reason: str) -> None:
        log.error("step refused", workers=session.names, step=said.step, reason=reason)
        self.sessions.failed(session, m.StepFailed(said.life, said.session, said.step, said.lane, reason))

    async def _serve_clients(self) -> None:
        async for peer, message, _ in self.clients:
            match message:
                case m.Generate():
                    self._generate(peer, message)
                case m.Cancel():
                    self.intake.cancel(peer, message.request)
                    if self.engine is not None:
                        self.engine.cancel(peer, message.request)
                case m.GetStatus():
                    self._send_client(peer, m.Status(message.request, status(self)))
                case m.Tokenize() | m.Detokenize():
                    self._ask_text(peer, message)

    def _ask_text(self, peer: bytes, question: m.Tokenize | m.Detokenize) -> None:
        async def answer() -> None:
            self._send_client(peer, await self._token_text.answer(question), is_end=True)

        task = asyncio.create_task(answer())
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    def _generate(self, peer: bytes, message: m.Generate) -> None:
        unavailable = "the gateway is stopping" if self.draining else None
        if self.engine is None or not self.fleet.takes_requests():
            unavailable = unavailable or "the model is not ready yet; see the status"
        if unavailable is not None:
            self._send_client(peer, m.Failed(message.request, "unavailable", None, unavailable))
        else:
            self.intake.take(peer, message)

    # --- who is there ----------------------------------------------------------------------------------------------

    def _accepted(self, hello: m.Hello) -> None:
        self._untold.discard(hello.name)  # what its former process was not told
        if hello.compute is not None and self.engine is None:
            self.engine = self._make_engine(hello.compute)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self.config.heartbeat_s)
            self.beat()

    async def _watch_deadlines(self) -> None:
        while True:
            await asyncio.sleep(DEADLINE_S)
            if self.engine is not None:
                self.engine.expire()

    def beat(self) -> None:
        """A heartbeat is due: give up workers that have been silent for too long, or can't be told what to do."""
        for name in self.fleet.silent(SILENT_AFTER):
            self.sessions.lost(name, f"silent for {SILENT_AFTER} heartbeats", leaves=False)
        untold, self._untold = self._untold, set()
        for name in sorted(untold):
            if self.fleet.knows(name):  # it beats, and so a compute worker comes back, into a new session
                self.sessions.lost(name, "its data channel is broken", leaves=False)
        self._count_refused_handshakes()
        if self.engine is not None:
            self._give_up_waiting(self.engine)
            self.engine.report_shortage()
        self._pump()

    def _count_refused_handshakes(self) -> None:
        count = sum(server.refused_handshakes for server in (self.control, self.data, self.clients))
        if count > self.refused_handshakes:
            log.warning("refused who had no key that is known", handshakes=count - self.refused_handshakes)
        self.refused_handshakes = count

    def _give_up_waiting(self, engine: Engine) -> None:
        """Every request ends: also when frames were lost between workers whose hearts beat, or no worker comes back."""
        steps = engine.scheduler.under_way
        for lane in self._for_steps.beat(steps):
            session = self.fleet.session_of(lane)
            reason = f"a step was not done within {GIVE_UP_AFTER} heartbeats"
            if session.standing is Standing.READY:
                number = lane - session.first_lane
                self.sessions.failed(session, m.StepFailed(self.life, session.number, steps[lane], number, reason))
        unserved = len(engine.streams) > 0 and not self.fleet.open_lanes()
        if self._for_lanes.beat({"any": None} if unserved else {}):
            engine.give_up(f"no compute worker was ready for {GIVE_UP_AFTER} heartbeats")

    # --- what is sent ----------------------------------------------------------------------------------------------

    def _say(self, peer: bytes, message: m.Welcome | m.Refused | m.Heartbeat | m.Goodbye) -> None:
        try:
            self.control.send(peer, message)
        except PeerGone as error:
            name = peer.decode(errors="replace")
            log.info("not told", worker=name, kind=type(message).__name__, reason=str(error))

    def _tell(self, name: str, message: GatewayToWorkerData, payload: Buffer | None = None) -> None:
        try:
            self.data.send(name.encode(), message, payload)
        except PeerGone as error:
            log.warning("not told", worker=name, kind=type(message).__name__, reason=str(error))
            self._untold.add(name)

    def _send_client(self, peer: bytes, message: GatewayToClient, is_end: bool = False) -> None:
        try:
            self.clients.send(peer, message, always=is_end)
        except PeerGone:
            if isinstance(message, m.Delta):
                raise
            log.info("a client left before its answer", kind=type(message).__name__)

    def _deliver(self, outputs: list[Output]) -> None:
        self._engine().deliver(outputs)

    def _pump(self) -> None:
        """Whatever has happened: go on as far as can be gone on now."""
        self.registry.accept_returning()
        if self.engine is not None:
            self.engine.pump()

    def _engine(self) -> Engine:
        assert self.engine is not None, "workers are told nothing before a compute worker is there"
        return self.engine

    def _make_engine(self, facts: m.ComputeFacts) -> Engine:
        """What the first compute worker's model allows decides what is admitted."""
        config = self.config
        max_model_len = min(facts.max_model_len, config.max_model_len or facts.max_model_len)
        limits = SchedulerConfig(
            max_model_len=max_model_len,
            max_batch_tokens=config.max_batch_tokens,
            max_sequences=config.max_sequences,
            max_waiting=config.max_waiting,
            block_size=config.block_size,
            policy=config.policy,
            prefix_cache=config.prefix_cache and not config.emulate_past,
            assume_stored=config.emulate_past,
            token_bytes=self.fleet.config.token_bytes(facts),
            namespace=f"{facts.digest} {facts.dtype} {config.kv_dtype}",
        )
        text = self._text
        admission = Admission(
            model=config.served_model_name or facts.model,
            text=text,
            vocab_size=facts.vocab_size,
            max_model_len=max_model_len,
            max_sequences=config.max_sequences,
            guides=_guides(text, facts.vocab_size),
        )
        return Engine(Scheduler(limits), self.fleet, admission, self._tell, self._send_client, tracer=self._tracer)


def _guides(text: Text | None, vocab_size: int) -> Guides | None:
    end_tokens = [] if text is None else sorted(token for token in text.eos_tokens if token < vocab_size)
    return Guides(text, vocab_size, end_tokens) if text is not None and end_tokens else None
