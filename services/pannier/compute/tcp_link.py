"""The link to an attention worker over plain TCP: as fast as the system is, and in the clear."""

import structlog
import zmq

from pannier.compute.link import Received, Tensors
from pannier.net import SocketOptions
from pannier.net.shm import Waiting
from pannier.net.tcp import Hello, dial
from pannier.runtime.reused_memory import ReusedMemory
from pannier.runtime.tensor_stream import TensorStream
from pannier.wire import AttentionToCompute, ComputeToAttention
from pannier.wire import messages as m
from pannier.wire.traffic import Traffic

log = structlog.get_logger()


class TcpLink:
    """One connection. It watches for itself: it is among what `waiting` waits for.

    An attention worker that has gone is noticed at once; what is sent to it then is dropped, as a socket would drop
    it: what becomes of its group is the gateway's to say.
    """

    kind = "tcp"
    socket: "zmq.Socket[bytes] | None" = None

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
        self._is_open = True
        waiting.add_stream(self._stream)

    def send(self, message: ComputeToAttention, tensors: Tensors) -> None:
        """Send, or keep until `flush`. Raises `PeerGone`, and `WireError` for a message that is too large."""
        if not self._stream.is_lost:
            self._messages.send(message, tensors)

    def receive(self) -> Received | None:
        """The next answer that has arrived. Raises `WireError`."""
        received = self._messages.receive()
        if received is None:
            if self._stream.is_lost and self._is_open:
                log.warning(
                    "the connection to an attention worker has ended", worker=self.name, reason=self._stream.reason
                )
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
        if self._is_open:
            self._is_open = False
            self._waiting.remove_stream(self._stream)
            self._stream.close()
