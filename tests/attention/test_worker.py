"""The data loop over real sockets: whatever peers send, the loop goes on and serves the others."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq

from pannier.attention.core import AttentionCore
from pannier.attention.worker import AttentionWorker
from pannier.net import SocketOptions, bind, close_bound, connect
from pannier.runtime.threads import StopSignal
from pannier.wire import AttentionToCompute, Decoder, Dtype, encode
from pannier.wire import messages as m
from pannier.wire.tensors import encode_with, unpack

from .rig import CALLS, LIFE, WHOLE, Frame, Hand, Stored, assert_answers, chunk, decode

pytestmark = pytest.mark.timeout(30)
WAIT_MS = 15_000


@dataclass
class Running:
    """A worker whose loop runs in a thread, its gateway's socket, and where compute workers dial."""

    worker: AttentionWorker
    gateway: "zmq.Socket[bytes]"
    context: "zmq.Context[zmq.Socket[bytes]]"

    def tell(self, message: m.Message) -> bytes:
        """Send as its gateway, and wait for the answer."""
        self.gateway.send_multipart([b"a0", *encode(message)])
        return receive(self.gateway)[1]

    def dial(self, identity: bytes | None = None) -> "zmq.Socket[bytes]":
        return connect(self.context, zmq.DEALER, self.worker.endpoint, identity=identity)


def receive(socket: "zmq.Socket[bytes]") -> list[bytes]:
    assert socket.poll(WAIT_MS), "nothing came"
    return socket.recv_multipart()


@pytest.fixture(params=["tcp", "ipc"])
def running(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Running]:
    """Assigned and ready; its thread must end when told to."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    gateway, endpoint = bind(context, zmq.ROUTER, "tcp://127.0.0.1:0")
    listen = "tcp://127.0.0.1:0" if request.param == "tcp" else f"ipc://{tmp_path}/a0"
    worker = AttentionWorker(
        context, "a0", AttentionCore(torch.device("cpu")), listen, SocketOptions(max_bytes=1 << 20)
    )
    worker.join(m.Welcome(LIFE, endpoint, 1.0))
    stop = StopSignal()
    thread = threading.Thread(target=worker.loop, args=(stop,))
    thread.start()
    assert receive(gateway) == [b"a0", *encode(m.Join(LIFE))]
    running = Running(worker, gateway, context)
    running.tell(m.AttentionAssign(LIFE, 0, 0, CALLS, WHOLE, 20, 4, Dtype.FLOAT32, Dtype.FLOAT32))
    yield running
    stop.set()
    thread.join(10)
    assert not thread.is_alive()
    stop.close()
    worker.close()
    close_bound(gateway, endpoint)
    context.term()


def ask(socket: "zmq.Socket[bytes]", frames: list[Frame]) -> list[Any]:
    """Send some frames, and collect answers until the step is written or failed."""
    for message, tensors in frames:
        socket.send_multipart(encode_with(message, tensors))
    decoder: Decoder[Any] = Decoder(AttentionToCompute)
    replies: list[Any] = []
    while not replies or not isinstance(replies[-1][0], m.StepWritten | m.StepFailed):
        message, payload = decoder.decode([bytearray(frame) for frame in receive(socket)])
        replies.append((message, unpack(getattr(message, "parts", ()), payload)))
    return replies


def test_steps_over_sockets(running: Running) -> None:
    """Answers over a socket are the same as without."""
    hand, sequence = Hand(), Stored([3, 1, 2])
    with running.dial(b"c0") as compute:
        ask(compute, hand.only(0, [chunk(sequence, 7)]).frames)
        step = hand.only(1, [decode(sequence)])
        assert_answers([ask(compute, step.frames)], step.answers)


def test_rude_peers(running: Running) -> None:
    """Noise, frames too many and peers without a name are counted; a huge frame ends its own connection only."""
    hand, sequence = Hand(), Stored([3, 1, 2])
    with running.dial(b"c0") as compute, running.dial(b"\xff\xfe") as nameless, running.dial() as anonymous:
        ask(compute, hand.only(0, [chunk(sequence, 7)]).frames)
        rude = [[b""], [b"noise"], [b"a", b"b", b"c"], [bytes(f) for f in encode(m.Join(LIFE))]]
        for frames in rude:
            nameless.send_multipart(frames)
        for socket in (nameless, anonymous):
            socket.send_multipart([bytes(f) for f in encode(m.EndStep(LIFE + 1, 1, 1, 0, 0))])
            (failed, _), *_ = ask(socket, [(m.BeginStep(LIFE, 1, 1, 0, (), (), ()), [torch.zeros(1)])])
            assert isinstance(failed, m.StepFailed)
        anonymous.send(bytes(2 << 20))
        step = hand.only(1, [decode(sequence)])
        assert_answers([ask(compute, step.frames)], step.answers)
        counters = running.worker.counters()
        assert (counters["refused_frames"], counters["stale_frames"]) == (len(rude), 2)


def test_answers_to_a_peer_that_left(running: Running) -> None:
    """A compute worker that leaves in mid-step hinders nobody."""
    step = Hand(seed=3).only(0, [chunk(Stored([5, 6]), 4)])
    with running.dial(b"c1") as leaving:
        for message, tensors in step.frames:
            leaving.send_multipart(encode_with(message, tensors))
    hand, sequence = Hand(), Stored([3, 1, 2])
    with running.dial(b"c0") as compute:
        made = [hand.only(0, [chunk(sequence, 7)]), hand.only(1, [decode(sequence)])]
        ask(compute, made[0].frames)
        assert_answers([ask(compute, made[1].frames)], made[1].answers)


def test_a_fence_over_the_gateways_socket(running: Running) -> None:
    """It is acknowledged, and what the fenced session still sends is dropped."""
    hand, sequence = Hand(), Stored([3, 1, 2])
    with running.dial(b"c0") as compute:
        ask(compute, hand.only(0, [chunk(sequence, 7)]).frames)
        assert running.tell(m.Fence(LIFE, "c0", 1)) == encode(m.Fenced(LIFE, "c0", 1))[0]
        late = hand.only(1, [chunk(sequence, 2)])
        for message, tensors in late.frames:
            compute.send_multipart(encode_with(message, tensors))
        again = Hand(session=2).only(0, [chunk(Stored([7]), 3)])
        assert isinstance(ask(compute, again.frames)[-1][0], m.StepWritten)
    assert running.worker.counters()["stale_frames"] == len(late.frames)
