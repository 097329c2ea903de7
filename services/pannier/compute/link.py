"""Links: how a compute worker reaches an attention worker. Both kinds carry the same messages."""

from collections import Counter, deque
from collections.abc import Iterable
from typing import Protocol, TypeAlias

import torch
import zmq

from pannier.net import SocketOptions, connect
from pannier.net.outbox import Outbox
from pannier.wire import AttentionToCompute, ComputeToAttention, Decoder
from pannier.wire import messages as m
from pannier.wire.tensors import encode_with, unpack
from pannier.wire.traffic import Traffic

Tensors: TypeAlias = list[torch.Tensor]
Received: TypeAlias = tuple[AttentionToCompute, Tensors]


class Link(Protocol):
    """One attention worker as the step thread sees it. Nothing here blocks."""

    name: str
    kind: str
    socket: "zmq.Socket[bytes] | None"
    """What a poller watches; None if answers are there at once, or the link watches for itself."""

    def send(self, message: ComputeToAttention, tensors: Tensors) -> None:
        """Send, or keep until `flush`: from here on nobody writes into the tensors. Raises `PeerGone`."""

    def receive(self) -> Received | None:
        """The next answer that has arrived. Raises `WireError`."""

    def flush(self) -> bool:
        """Send what was kept; True if nothing is left."""

    def close(self) -> None:
        """Close what it opened."""


class ZmqLink:
    """A link to another process."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        compute: str,
        address: m.ShardAddress,
        options: SocketOptions,
        traffic: Traffic | None = None,
    ) -> None:
        self.name = address.name
        self.kind = f"zmq {address.endpoint.partition('://')[0]}"
        self.socket: zmq.Socket[bytes] | None = connect(
            context, zmq.DEALER, address.endpoint, options, identity=compute.encode()
        )
        self._socket = self.socket
        self._outbox = Outbox(lambda frames: self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False))
        self._decoder: Decoder[AttentionToCompute] = Decoder(AttentionToCompute, traffic)

    def send(self, message: ComputeToAttention, tensors: Tensors) -> None:
        """Send, or keep until `flush`. Raises `PeerGone`."""
        self._outbox.put(encode_with(message, tensors))

    def receive(self) -> Received | None:
        """The next answer that has arrived. Raises `WireError`."""
        try:
            frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        message, payload = self._decoder.decode([frame.buffer for frame in frames])
        return message, unpack(getattr(message, "parts", ()), payload)

    def flush(self) -> bool:
        """Send what was kept; True if nothing is left."""
        return self._outbox.flush()

    def close(self) -> None:
        """Close the socket; what was kept is dropped."""
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
    socket: "zmq.Socket[bytes] | None" = None

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
