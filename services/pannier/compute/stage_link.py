"""How a compute worker that runs one stage of a model reaches the next, and is reached by the one before."""

import zmq

from pannier.compute.link import Tensors
from pannier.net import SocketOptions, bind, close_bound, connect
from pannier.net.outbox import Outbox
from pannier.wire import Decoder, StageToStage
from pannier.wire import messages as m
from pannier.wire.tensors import encode_with, unpack


class StageLink:
    """One socket each way: stages are a ring, in which the last one hands what it draws to the first."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str, options: SocketOptions) -> None:
        self._context = context
        self._options = options
        self.socket, self.endpoint = bind(context, zmq.PULL, endpoint, options)
        self._next: zmq.Socket[bytes] | None = None
        self._outbox: Outbox | None = None
        self._decoder: Decoder[StageToStage] = Decoder(StageToStage)

    def dial(self, address: m.StageAddress) -> None:
        """Send to this one from now on."""
        self.hang_up()
        socket = self._next = connect(self._context, zmq.PUSH, address.endpoint, self._options)
        self._outbox = Outbox(lambda frames: socket.send_multipart(frames, zmq.NOBLOCK, copy=False))

    def send(self, message: StageToStage, tensors: Tensors) -> None:
        """Send, or keep until `flush`. Raises `PeerGone` if too much is kept."""
        assert self._outbox is not None, "no step comes before the next stage is known"
        self._outbox.put(encode_with(message, tensors))

    def receive(self) -> tuple[StageToStage, Tensors] | None:
        """What has arrived next, of whatever session. Raises `WireError`."""
        try:
            frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        message, payload = self._decoder.decode([frame.buffer for frame in frames])
        return message, unpack(message.parts, payload)

    def flush(self) -> bool:
        """Send what was kept; True if nothing is left."""
        return self._outbox is None or self._outbox.flush()

    def hang_up(self) -> None:
        """Close the connection to the next stage; what was kept is dropped."""
        if self._next is not None:
            self._next.close()
        self._next = self._outbox = None

    def close(self) -> None:
        """Close both."""
        self.hang_up()
        close_bound(self.socket, self.endpoint)
