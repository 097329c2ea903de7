"""A gateway by hand: a real ROUTER socket that speaks the wire protocol and does what a test tells it."""

import contextlib
import gc
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Self

import pytest
import zmq

from pannier.net import SocketOptions, bind
from pannier.wire import ClientToGateway, Decoder, encode
from pannier.wire.messages import (
    Cancel,
    Delta,
    Detokenize,
    Failed,
    Generate,
    GetStatus,
    Message,
    Status,
    Tokenize,
    Tokens,
    TokenText,
    Usage,
)

Reply = Callable[[Generate], Sequence[Message]]
WAIT_S = 10.0


def words(text: str, request: str = "") -> list[Delta]:
    """The chunks of an answer: one for each word of `text`, the last with reason and usage."""
    parts = text.split(" ")
    usage = Usage(prompt_tokens=2, cached_tokens=0, completion_tokens=len(parts))
    deltas = [Delta(request, 0, part + " ", (number,), (), (), None, None) for number, part in enumerate(parts)]
    return [*deltas[:-1], Delta(request, 0, parts[-1], (len(parts) - 1,), (), (), "length", usage)]


def repeat_prompt(message: Generate) -> Sequence[Message]:
    """Answer with the words of the prompt."""
    return words(message.prompt or "", message.request)


def say_nothing(_: Generate) -> Sequence[Message]:
    """Leave the answer to the test."""
    return []


class FakeGateway:
    """Answers questions for the status; answers requests by `reply`; keeps what it received."""

    def __init__(self, endpoint: str, reply: Reply = repeat_prompt, options: SocketOptions = SocketOptions()) -> None:
        self.received: SimpleQueue[Generate | Cancel] = SimpleQueue()
        self._reply = reply
        self._context = zmq.Context()
        self._router, self.endpoint = bind(self._context, zmq.ROUTER, endpoint, options)
        self._decoder: Decoder[ClientToGateway] = Decoder(ClientToGateway)
        self._peers: dict[str, bytes] = {}
        self._outgoing: SimpleQueue[tuple[str, list[bytes]] | None] = SimpleQueue()
        self._bell, self._rope = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="fake-gateway")
        self._thread.start()

    def next_request(self) -> Generate:
        """Wait for a request."""
        message = self.received.get(timeout=WAIT_S)
        assert isinstance(message, Generate)
        return message

    def next_cancel(self) -> str:
        """Wait for a cancellation and say of which request."""
        message = self.received.get(timeout=WAIT_S)
        assert isinstance(message, Cancel)
        return message.request

    def send(self, *messages: Delta | Failed) -> None:
        """Answer a request received before."""
        for message in messages:
            self.send_frames(message.request, [bytes(frame) for frame in encode(message)])

    def send_frames(self, request: str, frames: list[bytes]) -> None:
        """Send anything to the peer of a request."""
        self._outgoing.put((request, frames))
        self._rope.send(b"\0")

    def close(self) -> None:
        """Send what is to be sent, then go."""
        if self._thread.is_alive():
            self._outgoing.put(None)
            self._rope.send(b"\0")
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._bell, zmq.POLLIN)
        poller.register(self._router, zmq.POLLIN)
        open_ = True
        while open_:
            events = dict(poller.poll())
            if self._router in events:
                peer, *frames = self._router.recv_multipart()
                self._take(peer, self._decoder.decode(frames)[0])
            if self._bell.fileno() in events:
                self._bell.recv(1)
                open_ = self._send_next()
        self._router.close(linger=1000)
        self._context.term()
        self._bell.close()
        self._rope.close()

    def _take(self, peer: bytes, message: ClientToGateway) -> None:
        self._peers[message.request] = peer
        if isinstance(message, GetStatus):
            self._answer(peer, Status(message.request, {"model": "ox"}))
            return
        if isinstance(message, Tokenize):
            self._answer(peer, Tokens(message.request, tuple(range(len(message.text or message.messages or "")))))
            return
        if isinstance(message, Detokenize):
            pieces = tuple(str(token).encode() for token in message.tokens)
            self._answer(peer, TokenText(message.request, b"".join(pieces).decode(), pieces))
            return
        self.received.put(message)
        if isinstance(message, Generate):
            for answer in self._reply(message):
                self._answer(peer, answer)

    def _send_next(self) -> bool:
        order = self._outgoing.get()
        if order is not None:
            request, frames = order
            self._send_frames(self._peers[request], frames)
        return order is not None

    def _answer(self, peer: bytes, message: Message) -> None:
        self._send_frames(peer, [bytes(frame) for frame in encode(message)])

    def _send_frames(self, peer: bytes, frames: list[bytes]) -> None:
        with contextlib.suppress(zmq.ZMQError):  # the client has left
            self._router.send_multipart([peer, *frames])


@pytest.fixture(params=["tcp", "ipc"])
def endpoint(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where a gateway may listen, for each transport."""
    return "tcp://127.0.0.1:0" if request.param == "tcp" else f"ipc://{tmp_path}/gateway"


@pytest.fixture
def ipc(tmp_path: Path) -> str:
    """Where a gateway may listen, and again after it has gone."""
    return f"ipc://{tmp_path}/gateway"


@pytest.fixture
def gateway(endpoint: str) -> Iterator[FakeGateway]:
    """Repeats prompts."""
    with FakeGateway(endpoint) as made:
        yield made


@pytest.fixture
def quiet(ipc: str) -> Iterator[FakeGateway]:
    """Answers what the test tells it to."""
    with FakeGateway(ipc, say_nothing) as made:
        yield made


@pytest.fixture
def make_gateway() -> Iterator[Callable[[str], FakeGateway]]:
    """Starts gateways that repeat prompts, at an endpoint of the test's choice."""
    with contextlib.ExitStack() as made:
        yield lambda endpoint: made.enter_context(FakeGateway(endpoint))


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def _client_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name in ("pannier-client", "fake-gateway")]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Fails a test that leaves a thread or an open socket behind."""
    before = _open_files()
    gc.freeze()  # so that collecting looks at what the test makes, and not at all of torch
    yield
    gc.collect()
    deadline = time.monotonic() + WAIT_S
    while (_client_threads() or _open_files() > before) and time.monotonic() < deadline:
        time.sleep(0.01)  # a finaliser stops its thread without waiting for it
    assert _client_threads() == []
    assert _open_files() <= before
