"""The attention worker's data thread: receive, kernel, send. Plain blocking code that owns every data socket."""

import zmq

from pannier.attention.core import AttentionCore
from pannier.attention.same_host import Caller, SameHost
from pannier.net import SocketOptions, bind, close_bound, connect
from pannier.net.errors import PeerGone
from pannier.net.flows import peer_of_flow
from pannier.net.outbox import Frames, Outbox
from pannier.net.shm import SPIN_US, Waiting
from pannier.runtime.threads import StopSignal
from pannier.wire import ComputeToAttention, Decoder, GatewayToWorkerData, WireError, encode
from pannier.wire import messages as m
from pannier.wire.tensors import encode_with, unpack
from pannier.wire.traffic import Traffic

RETRY_MS = 2
"""How soon a full queue is tried again."""
BATCH = 64
"""Messages taken from one peer or socket before the others are looked at."""


class AttentionWorker:
    """Serves compute workers on `endpoint` and behind `door`, and obeys the gateway. `loop` is its data thread."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        name: str,
        core: AttentionCore,
        endpoint: str,
        options: SocketOptions,
        spin_us: int = SPIN_US,
        link_options: SocketOptions | None = None,
    ) -> None:
        self.core = core
        self._context = context
        self._name = name
        self._options = options
        self._spin_us = spin_us
        self._links, self.endpoint = bind(context, zmq.ROUTER, endpoint, link_options or options)
        self._traffic = Traffic()
        self._same_host = SameHost(self._traffic)
        self.door = self._same_host.address
        self._outboxes: dict[bytes, Outbox] = {}
        self._link_decoder: Decoder[ComputeToAttention] = Decoder(ComputeToAttention, self._traffic)
        self._gateway_decoder: Decoder[GatewayToWorkerData] = Decoder(GatewayToWorkerData)

    def join(self, welcome: m.Welcome) -> None:
        """Dial the gateway that has welcomed this worker."""
        self._gateway = connect(
            self._context, zmq.DEALER, welcome.data_endpoint, self._options, identity=self._name.encode()
        )
        self._to_gateway = Outbox(lambda frames: self._gateway.send_multipart(frames, zmq.NOBLOCK, copy=False))
        self._to_gateway.put(encode(m.Join(welcome.life)))

    def loop(self, stop: StopSignal) -> None:
        """Serve until told to stop; closes what `join` opened."""
        waiting = Waiting(self._spin_us)
        for readable in (self._links, self._gateway, stop):
            waiting.register(readable)
        self._same_host.watch(waiting)
        try:
            while not stop.is_set():
                ready = waiting.wait(None if self._flush() else RETRY_MS)
                if self._gateway in ready:
                    self._obey_gateway()
                if self._links in ready:
                    self._serve_links()
                for caller in self._same_host.callers():
                    self._serve_caller(caller)
        finally:
            self._gateway.close()

    def counters(self) -> dict[str, float]:
        """What the gateway shows of this worker."""
        return {name: float(count) for name, count in {**self.core.counters, **self._traffic.counters()}.items()}

    def close(self) -> None:
        """Close the socket for links; what waits for peers is dropped."""
        self._outboxes.clear()
        self._same_host.close()
        close_bound(self._links, self.endpoint)

    def _obey_gateway(self) -> None:
        message, _ = self._gateway_decoder.decode(self._gateway.recv_multipart())
        match message:
            case m.AttentionAssign():
                self.core.assign(message)
                self._to_gateway.put(encode(m.Ready(message.life, message.group, 0, "")))
            case m.Fence():
                self._to_gateway.put(encode(self.core.fence(message)))
            case _:
                raise WireError(f"an attention worker has no use for {type(message).__name__}")

    def _serve_links(self) -> None:
        for _ in range(BATCH):
            try:
                peer, *frames = self._links.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._serve(peer.bytes, [frame.buffer for frame in frames])

    def _serve(self, peer: bytes, frames: Frames) -> None:
        try:
            message, payload = self._link_decoder.decode(frames)
        except WireError:
            self.core.counters["refused_frames"] += 1
            return
        tensors = unpack(getattr(message, "parts", ()), payload)
        for reply, answer in self.core.receive(peer_of_flow(peer), message, tensors):
            self._send(peer, encode_with(reply, answer))

    def _serve_caller(self, caller: Caller) -> None:
        """The same for a peer on this host, whose tensors lie in shared memory."""
        for _ in range(BATCH):
            try:
                received = caller.messages.receive()
            except WireError:
                self.core.counters["refused_frames"] += 1
                continue
            if received is None:
                return
            lane, message, tensors = received
            replies = list(self.core.receive(caller.name, message, tensors))
            # By now the core has stored, attended to or copied all that it was given; before the answer is sent, so
            # that the lane finds its ring empty when it asks next.
            caller.messages.release()
            for reply, answer in replies:
                try:
                    caller.answer(lane, reply, answer)
                except PeerGone:
                    self.core.counters["answers_to_lost_peers"] += 1

    def _send(self, peer: bytes, frames: Frames) -> None:
        outbox = self._outboxes.get(peer)
        if outbox is None:
            outbox = self._outboxes[peer] = Outbox(
                lambda waiting: self._links.send_multipart([peer, *waiting], zmq.NOBLOCK, copy=False)
            )
        try:
            outbox.put(frames)
        except PeerGone:
            self.core.counters["answers_to_lost_peers"] += 1
        if not len(outbox):
            del self._outboxes[peer]

    def _flush(self) -> bool:
        """Send what was kept; True if nothing is left."""
        self._to_gateway.flush()
        for peer, outbox in list(self._outboxes.items()):
            try:
                done = outbox.flush()
            except PeerGone:
                done = True
            if done:
                del self._outboxes[peer]
        return self._same_host.flush() and not self._outboxes and not len(self._to_gateway)
