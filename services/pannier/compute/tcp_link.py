"""The link to an attention worker over plain TCP: as fast as the system is, and in the clear."""

from pannier.compute.link import Received, Tensors
from pannier.net import SocketOptions
from pannier.net.shm import Waiting
from pannier.net.tcp import Hello, dial, parse
from pannier.runtime.reused_memory import ReusedMemory
from pannier.runtime.tensor_stream import TensorStream
from pannier.wire import AttentionToCompute, ComputeToAttention
from pannier.wire import messages as m
from pannier.wire.traffic import Traffic


class TcpLink:
    """One connection, among what `waiting` waits for; its end is noticed as soon as the system knows of it."""

    kind = "tcp"

    def __init__(
        self,
        waiting: Waiting,
        compute: str,
        address: m.ShardAddress,
        largest: tuple[int, int],
        options: SocketOptions,
        flow: int = 0,
        traffic: Traffic | None = None,
    ) -> None:
        """`largest` are bytes of frames, to attention and to compute. Raises `Exposed`, `CannotTalk`, `NetError`."""
        self.name = address.name
        self._waiting = waiting
        self._stream = dial(address.tcp, address.name, Hello("", compute, flow, largest), options, ReusedMemory())
        self._messages: TensorStream[AttentionToCompute] = TensorStream(self._stream, AttentionToCompute, traffic)
        self._endpoint = parse(address.tcp).endpoint
        self.lost: str | None = None
        waiting.add_stream(self._stream)

    @property
    def is_up(self) -> bool:
        """Whether the other end has answered."""
        return self._stream.is_up()

    def send(self, message: ComputeToAttention, tensors: Tensors) -> None:
        """Send, or keep until `flush`. Raises `PeerGone`, and `WireError` for a message that is too large."""
        if not self._stream.is_lost:
            self._messages.send(message, tensors)

    def receive(self) -> Received | None:
        """The next answer that has arrived. Raises `WireError`."""
        received = self._messages.receive()
        if received is None:
            if self._stream.is_lost:
                self.close()
            return None
        message, tensors, stay = received
        # A lane takes its answer when it is resumed; the next one may have arrived by then.
        return message, tensors if stay else [tensor.clone() for tensor in tensors]

    def flush(self) -> bool:
        """Send what was kept; True if nothing is left."""
        return self._stream.is_lost or self._stream.flush()

    def close(self) -> None:
        """Hang up; what was kept is dropped."""
        if self.lost is None:
            self.lost = f"{self._endpoint}: {self._stream.reason or 'closed'}"
            self._waiting.remove_stream(self._stream)
            self._stream.close()
