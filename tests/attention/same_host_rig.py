"""Compute workers by hand that share memory with an attention worker whose loop runs in a thread."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import zmq

from pannier.attention.core import AttentionCore, Reply
from pannier.attention.emulated_network import EmulatedNetwork
from pannier.attention.pace import PacedDevice
from pannier.attention.worker import AttentionWorker
from pannier.net import SocketOptions, bind, close_bound
from pannier.net.shm import Layout, Waiting, knock
from pannier.runtime.tensor_channel import TensorChannel
from pannier.runtime.threads import StopSignal
from pannier.wire import AttentionToCompute, Dtype, encode
from pannier.wire import messages as m

from .rig import CALLS, LIFE, WHOLE, Frame

PATIENCE_S = 15.0
LAYOUT = Layout(2, (1 << 16, 1 << 16))


class Peer:
    """A compute worker's end."""

    def __init__(self, door: str, name: str, layout: Layout = LAYOUT) -> None:
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

    def ask(self, frames: list[Frame]) -> list[Reply]:
        """Send some frames, and collect answers until a step is written or failed."""
        self.send(frames)
        replies = [self.receive()]
        while not isinstance(replies[-1][0], m.StepWritten | m.StepFailed):
            replies.append(self.receive())
        return replies

    def close(self) -> None:
        self._waiting.remove(self.channel)
        self.messages.close()


class Rig:
    """A worker whose loop runs in a thread, and its gateway's socket."""

    def __init__(self, worker: AttentionWorker, gateway: "zmq.Socket[bytes]") -> None:
        self.worker = worker
        self._gateway = gateway

    @contextmanager
    def peer(self, name: str, layout: Layout = LAYOUT) -> Iterator[Peer]:
        peer = Peer(self.worker.door, name, layout)
        try:
            yield peer
        finally:
            peer.close()

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
