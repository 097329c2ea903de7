"""Links: how a compute worker reaches an attention worker. All kinds carry the same messages."""

from collections import Counter, deque
from collections.abc import Iterable
from typing import Protocol, TypeAlias

import torch
import zmq

from pannier.net import Monitor, News, SocketOptions, connect
from pannier.net.outbox import Outbox
from pannier.net.shm import Waiting
from pannier.wire import AttentionToCompute, ComputeToAttention, Decoder
from pannier.wire import messages as m
from pannier.wire.tensors import encode_with, unpack
from pannier.wire.traffic import Traffic

Tensors: TypeAlias = list[torch.Tensor]
Received: TypeAlias = tuple[AttentionToCompute, Tensors]


class Link(Protocol):
    """One attention worker as the step thread sees it. Nothing here blocks.

    It watches for itself: whoever waits is woken by what it has to tell. One that is lost stays lost, drops what it is
    given, and has let go of all it had.
    """

    name: str
    kind: str

    @property
    def is_up(self) -> bool:
        """Whether the other end has answered."""

    @property
    def lost(self) -> str | None:
        """Why nothing comes or goes any more; None as long as, for all that is known, something may."""

    def send(self, message: ComputeToAttention, tensors: Tensors) -> None:
        """Send, or keep until `flush`: from here on nobody writes into the tensors. Raises `PeerGone`."""

    def receive(self) -> Received | None:
        """The next answer that has arrived. Raises `WireError`."""

    def flush(self) -> bool:
        """Send what was kept; True if nothing is left."""

    def close(self) -> None:
        """Close what it opened."""


class ZmqLink:
    """A link to another process over ZeroMQ.

    A socket would dial again by itself, but what was under way is lost with a connection, so that ends the link.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        waiting: Waiting,
        compute: str,
        address: m.ShardAddress,
        options: SocketOptions,
        traffic: Traffic | None = None,
    ) -> None:
        self.name = address.name
        self.kind = f"zmq {address.endpoint.partition('://')[0]}"
        self.is_up = False
        self.lost: str | None = None
        self._endpoint = address.endpoint
        self._waiting = waiting
        self._monitor = Monitor()
        self._socket = connect(context, zmq.DEALER, address.endpoint, options, compute.encode(), self._monitor)
        self._watched = (self._socket, self._monitor.socket)
        for socket in self._watched:
            waiting.register(socket)
        self._outbox = Outbox(lambda frames: self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False))
        self._decoder: Decoder[AttentionToCompute] = Decoder(AttentionToCompute, traffic)

    def send(self, message: ComputeToAttention, tensors: Tensors) -> None:
        """Send, or keep until `flush`. Raises `PeerGone`."""
        if self.lost is None:
            self._outbox.put(encode_with(message, tensors))

    def receive(self) -> Received | None:
        """The next answer that has arrived. Raises `WireError`."""
        if self.lost is not None:
            return None
        try:
            frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            self._hear(self._monitor.news())
            return None
        message, payload = self._decoder.decode([frame.buffer for frame in frames])
        return message, unpack(getattr(message, "parts", ()), payload)

    def flush(self) -> bool:
        """Send what was kept; True if nothing is left."""
        return self.lost is not None or self._outbox.flush()

    def close(self) -> None:
        """Close the socket; what was kept is dropped."""
        self._lose("closed")

    def _hear(self, news: News) -> None:
        self.is_up |= news.greeted
        if news.refusal is not None:
            self._lose(news.refusal)
        elif news.lost or news.failed_handshakes:
            self._lose("the connection has ended")
        elif news.unanswered:
            self._lose("nobody answers")

    def _lose(self, reason: str) -> None:
        if self.lost is None:
            self.lost = f"{self._endpoint}: {reason}"
            for socket in self._watched:
                self._waiting.unregister(socket)
            self._monitor.close()
            self._socket.close()


class LocalAttention(Protocol):
    """An attention worker's core inside this process."""

    counters: Counter[str]

    def assign(self, assign: m.AttentionAssign) -> None:
        """Allocate the blocks."""

    def fence(self, fence: m.Fence) -> m.Fenced:
        """End a compute worker's sessions."""

    def receive(
        self, compute: str, message: ComputeToAttention, tensors: Tensors
    ) -> Iterable[tuple[AttentionToCompute, Tensors]]:
        """Replies to one message."""


class InProcessLink:
    """A link to the attention core in this very process: the same messages, no copies, no sockets."""

    kind = "in-process"
    is_up = True
    lost: str | None = None

    def __init__(self, compute: str, name: str, core: LocalAttention) -> None:
        self.name = name
        self._compute = compute
        self._core = core
        self._answers: deque[Received] = deque()

    def send(self, message: ComputeToAttention, tensors: Tensors) -> None:
        """Run the attention operator now; its answers wait for `receive`."""
        self._answers.extend(self._core.receive(self._compute, message, tensors))

    def receive(self) -> Received | None:
        """The next answer."""
        return self._answers.popleft() if self._answers else None

    def flush(self) -> bool:
        """Nothing is ever kept."""
        return True

    def close(self) -> None:
        """Nothing to close."""
