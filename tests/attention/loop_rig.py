"""An attention worker whose loop runs in a thread, and compute workers by hand: in shared memory, or over plain TCP."""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import torch
import zmq

from pannier.attention.core import AttentionCore, Reply
from pannier.attention.emulated_network import EmulatedNetwork
from pannier.attention.pace import PacedDevice
from pannier.attention.worker import AttentionWorker
from pannier.net import SocketOptions, bind, close_bound
from pannier.net.shm import Layout, Waiting, knock
from pannier.net.tcp import Hello, dial
from pannier.runtime.reused_memory import ReusedMemory
from pannier.runtime.tensor_channel import TensorChannel
from pannier.runtime.tensor_stream import TensorStream
from pannier.runtime.threads import StopSignal
from pannier.wire import AttentionToCompute, Dtype, encode
from pannier.wire import messages as m

from .rig import CALLS, LIFE, WHOLE, Frame, Hand, Stored, answers_of, assert_answers, chunk, decode

PATIENCE_S = 15.0
LAYOUT = Layout(2, (1 << 16, 1 << 16))
LARGEST = (1 << 20, 1 << 20)
"""Bytes of frames, each way."""


class Peer(ABC):
    """A compute worker's end."""

    @abstractmethod
    def send(self, frames: list[Frame]) -> None: ...

    @abstractmethod
    def receive(self) -> Reply: ...

    def ask(self, frames: list[Frame]) -> list[Reply]:
        """Send some frames, and collect answers until a step is written or failed."""
        self.send(frames)
        replies = [self.receive()]
        while not isinstance(replies[-1][0], m.StepWritten | m.StepFailed):
            replies.append(self.receive())
        return replies

    @abstractmethod
    def close(self) -> None: ...


class ShmPeer(Peer):
    """One that shares memory."""

    def __init__(self, door: str, name: str, layout: Layout) -> None:
        self.channel = knock(door, name, "a0", layout)
        self.messages: TensorChannel[AttentionToCompute] = TensorChannel(self.channel, AttentionToCompute)
        self._waiting = Waiting(0)
        self._waiting.add(self.channel)

    def send(self, frames: list[Frame]) -> None:
        for message, tensors in frames:
            self.messages.send(message.lane, message, tensors)

    def receive(self) -> Reply:
        deadline = time.monotonic() + PATIENCE_S
        while (received := self.messages.receive()) is None:
            assert time.monotonic() < deadline, "nothing came"
            self._waiting.wait(None if self.messages.flush() else 2)
        _, message, tensors = received
        copies = [tensor.clone() for tensor in tensors]
        self.messages.release()
        return message, copies

    def close(self) -> None:
        self._waiting.remove(self.channel)
        self.messages.close()


class TcpPeer(Peer):
    """One connection over plain TCP."""

    def __init__(self, address: str, name: str, largest: tuple[int, int], flow: int) -> None:
        self.stream = dial(address, "a0", Hello("", name, flow, largest), SocketOptions(), ReusedMemory())
        self.messages: TensorStream[AttentionToCompute] = TensorStream(self.stream, AttentionToCompute)
        self._waiting = Waiting(0)
        self._waiting.add_stream(self.stream)

    def send(self, frames: list[Frame]) -> None:
        for message, tensors in frames:
            self.messages.send(message, tensors)

    def receive(self) -> Reply:
        deadline = time.monotonic() + PATIENCE_S
        while (received := self.messages.receive()) is None:
            assert time.monotonic() < deadline, "nothing came"
            assert not self.stream.is_lost, self.stream.reason
            self._waiting.wait(10 if self.stream.flush() else 2)
        message, tensors, _ = received
        return message, [tensor.clone() for tensor in tensors]

    def wait_until_lost(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not self.stream.is_lost:
            assert time.monotonic() < deadline
            self._waiting.wait(10)
            self.stream.receive()

    def close(self) -> None:
        self._waiting.remove_stream(self.stream)
        self.stream.close()


class Rig:
    """A worker whose loop runs in a thread, and its gateway's socket."""

    def __init__(self, worker: AttentionWorker, gateway: "zmq.Socket[bytes]") -> None:
        self.worker = worker
        self._gateway = gateway

    def shm(self, name: str, layout: Layout = LAYOUT) -> "closing[ShmPeer]":
        return closing(ShmPeer(self.worker.door, name, layout))

    def tcp(self, name: str, largest: tuple[int, int] = LARGEST, flow: int = 0) -> "closing[TcpPeer]":
        return closing(TcpPeer(self.worker.tcp, name, largest, flow))

    def tell(self, message: m.Message) -> bytes:
        """Send as its gateway, and wait for the answer."""
        self._gateway.send_multipart([b"a0", *encode(message)])
        return self.receive()[1]

    def receive(self) -> list[bytes]:
        assert self._gateway.poll(int(PATIENCE_S * 1000))
        return self._gateway.recv_multipart()

    def wait_for(self, counter: str, count: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while self.worker.counters().get(counter, 0) < count:
            assert time.monotonic() < deadline
            time.sleep(0.01)


@contextmanager
def serving(folder: Path, network: EmulatedNetwork | None = None, device: PacedDevice | None = None) -> Iterator[Rig]:
    """Assigned and ready; its thread must end when told to."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    gateway, endpoint = bind(context, zmq.ROUTER, f"ipc://{folder}/gateway")
    core = AttentionCore(torch.device("cpu"), stretch=None if device is None else device.launch)
    worker = AttentionWorker(context, "a0", core, f"ipc://{folder}/a0", SocketOptions(), network=network, device=device)
    worker.join(m.Welcome(LIFE, endpoint, 1.0))
    stop = StopSignal()
    thread = threading.Thread(target=worker.loop, args=(stop,))
    thread.start()
    rig = Rig(worker, gateway)
    try:
        assert rig.receive() == [b"a0", *encode(m.Join(LIFE))]
        rig.tell(m.AttentionAssign(LIFE, 0, 0, CALLS, WHOLE, 20, 4, Dtype.FLOAT32, Dtype.FLOAT32))
        yield rig
    finally:
        stop.set()
        thread.join(10)
        assert not thread.is_alive()
        stop.close()
        worker.close()
        close_bound(gateway, endpoint)
        context.term()


def check_lanes(first: Peer, second: Peer) -> None:
    """Answers are right in several lanes of two compute workers at once."""
    for step, (peer, lane) in enumerate([(first, 0), (second, 0), (first, 1), (second, 1)]):
        hand, sequence = Hand(lane=lane, seed=step), Stored([4 * step + i for i in range(3)])
        peer.ask(hand.only(2 * step, [chunk(sequence, 7)]).frames)
        made = hand.only(2 * step + 1, [decode(sequence)])
        assert_answers([peer.ask(made.frames)], made.answers)


def check_no_room(narrow: Peer, other: Peer, words: str) -> None:
    """An answer that is too large is a failed step, which says so in these words, and the loop goes on."""
    hand, sequence = Hand(), Stored([3, 1, 2, 9, 8])
    narrow.ask(hand.only(0, [chunk(sequence, 7)]).frames)
    replies = narrow.ask(hand.only(1, [chunk(sequence, 10)]).frames)
    failed = replies[-1][0]
    assert isinstance(failed, m.StepFailed)
    assert words in failed.reason
    assert not answers_of(replies)
    assert isinstance(other.ask(Hand(seed=1).only(0, [chunk(Stored([5]), 3)]).frames)[-1][0], m.StepWritten)
