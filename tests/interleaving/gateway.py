"""The real gateway service without sockets or event loop: its three receiving loops are resumed by hand."""

import types
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import msgspec

from pannier.gateway import service as gateway_service
from pannier.gateway.admission import Admission, Admitted
from pannier.gateway.engine import Engine
from pannier.gateway.service import GatewayService
from pannier.runtime.config import GatewayConfig
from pannier.wire import Buffer
from pannier.wire import messages as m

Send = Callable[[bytes, Any, Buffer | None], None]


@types.coroutine
def _pause() -> Generator[None, None, None]:
    yield


class SimulatedServer:
    """Stands where the gateway has a `Server`: hands over what `arrive` was given, and sends through `on_send`."""

    on_send: Send
    refused_frames = refused_handshakes = 0

    def __init__(self, _context: object, _union: object, endpoint: str, _options: object) -> None:
        self.endpoint = endpoint
        self._arrived: deque[tuple[bytes, Any]] = deque()

    def arrive(self, peer: bytes, message: Any) -> None:
        """A message of a peer is there."""
        self._arrived.append((peer, message))

    async def __aiter__(self) -> AsyncIterator[tuple[bytes, Any, memoryview]]:
        while True:
            while not self._arrived:
                await _pause()
            peer, message = self._arrived.popleft()
            yield peer, message, memoryview(b"")

    def send(self, peer: bytes, message: Any, payload: Buffer | None = None, *, always: bool = False) -> None:
        """Send. Raises `PeerGone`."""
        del always
        self.on_send(peer, message, payload)

    @classmethod
    def instead(cls) -> AbstractContextManager[object]:
        """While this is entered, gateways are made with simulated servers."""
        return patch.object(gateway_service, "Server", cls)


@dataclass(frozen=True, kw_only=True)
class EndsAt(Admission):
    """Admission of a model without tokenizer that nevertheless has an end token, and stop strings in name only."""

    eos_token: int

    def read(self, message: m.Generate) -> tuple[int, ...]:
        """As the base, whatever the stop strings are."""
        return super().read(_without_stop(message))

    def admit(self, message: m.Generate, *args: Any, **options: Any) -> Admitted:
        """As the base, with the end token unless it is to be ignored; a stop string makes a request step by step."""
        admitted = super().admit(_without_stop(message), *args, **options)
        ends = frozenset[int]() if message.params.ignore_eos else frozenset({self.eos_token})
        changed = replace(admitted.request, stop_tokens=ends, step_by_step=bool(message.params.stop))
        return replace(admitted, request=changed)


def _without_stop(message: m.Generate) -> m.Generate:
    return msgspec.structs.replace(message, params=msgspec.structs.replace(message.params, stop=()))


class Gateway:
    """A gateway that runs only while a message is being handed to it."""

    def __init__(self, config: GatewayConfig, eos_token: int, sends: dict[str, Send]) -> None:
        self.service = GatewayService(config)
        self._eos_token = eos_token
        self._servers: dict[str, SimulatedServer] = {}
        with SimulatedServer.instead():
            _finish(self.service.startup())
        self._loops: dict[str, Coroutine[None, None, None]] = {
            "control": self.service._serve_control(),
            "data": self.service._serve_data(),
            "clients": self.service._serve_clients(),
        }
        for name, loop in self._loops.items():
            server = getattr(self.service, name)
            assert isinstance(server, SimulatedServer)
            server.on_send = sends[name]
            self._servers[name] = server
            loop.send(None)

    @property
    def engine(self) -> Engine | None:
        """The engine, once a compute worker has registered."""
        return self.service.engine

    def hand(self, socket: str, peer: str, message: Any) -> None:
        """A message arrives; everything that follows from it has happened when this returns."""
        self._servers[socket].arrive(peer.encode(), message)
        self._loops[socket].send(None)
        self._use_end_token()

    def silent(self, name: str) -> None:
        """A worker's heartbeats are missing."""
        if self.service.fleet.knows(name):
            self.service.sessions.lost(name, "silent", leaves=False)
            self.service._pump()

    def close(self) -> None:
        """End the loops."""
        for loop in self._loops.values():
            loop.close()
        self.service._context.term()

    def _use_end_token(self) -> None:
        engine = self.service.engine
        if engine is not None and not isinstance(engine.admission, EndsAt):
            engine.admission = EndsAt(**vars(engine.admission), eos_token=self._eos_token)


def _finish(coroutine: Coroutine[None, None, None]) -> None:
    """Run a coroutine that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
    raise AssertionError("it waits")
