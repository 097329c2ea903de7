"""A worker as a process: a control connection under asyncio, and a data thread beside it."""

import asyncio
import gc
import os
import secrets
import socket
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import structlog
import zmq
import zmq.asyncio

from pannier.runtime.config import AttentionConfig, ComputeConfig
from pannier.runtime.encryption import worker_sockets
from pannier.runtime.host import keep_to_cores
from pannier.runtime.registration import Registration
from pannier.runtime.tasks import first_end
from pannier.runtime.threads import DataThread, StopSignal
from pannier.runtime.tracing import Tracer, open_tracer
from pannier.wire import messages as m

IO_THREADS = 4
"""Of libzmq for data: one connection is served by one of them; those without any sleep."""
log = structlog.get_logger()
DataContext = zmq.Context[zmq.Socket[bytes]]


class Worker(Protocol):
    """What runs in the data thread."""

    def join(self, welcome: m.Welcome) -> None:
        """Dial the gateway; called once, before `loop`."""

    def loop(self, stop: StopSignal) -> None:
        """Work until told to stop; closes what `join` opened."""

    def counters(self) -> dict[str, float]:
        """What the gateway shows of this worker; may be called from another thread."""

    def close(self) -> None:
        """Close its sockets; called after `loop`, or instead of it."""


@dataclass(frozen=True)
class Facts:
    """What a worker brings to the gateway: one role, or both."""

    compute: m.ComputeFacts | None = None
    attention: m.AttentionFacts | None = None


class WorkerService(ABC):
    """Startup, run, drain and close of a worker; what the worker is, a subclass says in `prepare`."""

    role: str

    def __init__(self, config: ComputeConfig | AttentionConfig) -> None:
        self.name = config.name
        self._network = config
        self._control = zmq.asyncio.Context()
        self._data: DataContext = zmq.Context(IO_THREADS)
        self._worker: Worker | None = None
        self._registration: Registration | None = None
        self._thread: DataThread | None = None
        self.tracer: Tracer | None = None

    @abstractmethod
    async def prepare(self, context: DataContext) -> tuple[Worker, Facts]:
        """Make the worker and measure what it brings."""

    async def startup(self) -> None:
        """Prepare, then register; what is assigned arrives in the data thread.

        Raises `BadKeys`, `KeysRefused`, `ConfigError`.
        """
        if self._network.cores is not None:
            keep_to_cores(self._network.cores)  # before there are threads, which would not be moved
        self.sockets = worker_sockets(self._network)
        self.tracer = open_tracer(self.role, self.name, self._network.otlp_endpoint)
        self._worker, facts = await self.prepare(self._data)
        gc.collect()
        gc.freeze()  # what is there now stays: later collections, in the middle of steps, need not look at it
        self._registration = Registration(
            self._control, self._network.gateway, self._hello(facts), self.sockets.gateway
        )
        self._welcome = await self._registration.register()
        self._worker.join(self._welcome)
        self._thread = DataThread(f"{self.role}-data", self._worker.loop)
        self._thread.start()
        log.info("registered", gateway=self._network.gateway)

    async def run(self) -> None:
        """Work until the gateway says goodbye. Raises what ends the data thread, `GatewayLost` or `NotAccepted`."""
        assert self._registration is not None
        assert self._worker is not None
        assert self._thread is not None
        await first_end(
            self._registration.keep_alive(self._welcome, self._worker.counters),
            self._thread.wait(),
        )

    async def drain(self) -> None:
        """Tell the gateway that this worker is about to go."""
        assert self._registration is not None
        await self._registration.leave("asked to stop")

    async def close(self) -> None:
        """Stop the data thread and close every socket."""
        if self._thread is not None:
            await asyncio.to_thread(self._thread.stop)
        if self._worker is not None:
            self._worker.close()
        if self._registration is not None:
            self._registration.close()
        if self.tracer is not None:
            await asyncio.to_thread(self.tracer.close)
        self._control.term()
        self._data.term()

    def _hello(self, facts: Facts) -> m.Hello:
        return m.Hello(
            protocol=m.PROTOCOL,
            name=self.name,
            start=secrets.randbits(62),
            pid=os.getpid(),
            host=socket.gethostname(),
            event_loop=type(asyncio.get_running_loop()).__module__,
            compute=facts.compute,
            attention=facts.attention,
            encrypts_links=self._network.encrypts_links,
        )
