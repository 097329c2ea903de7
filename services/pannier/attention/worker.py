"""The attention worker's data thread: receive, kernel, send. Plain blocking code that owns every data socket."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import zmq

from pannier.attention.core import AttentionCore
from pannier.attention.emulated_network import EmulatedNetwork
from pannier.attention.over_tcp import OverTcp, beside
from pannier.attention.pace import PacedDevice
from pannier.attention.same_host import SameHost
from pannier.net import SocketOptions, bind, close_bound, connect
from pannier.net.errors import PeerGone
from pannier.net.flows import peer_of_flow
from pannier.net.outbox import Frames, Outbox
from pannier.net.shm import SPIN_US, Waiting
from pannier.runtime.threads import StopSignal
from pannier.wire import AttentionToCompute, ComputeToAttention, Decoder, GatewayToWorkerData, WireError, encode
from pannier.wire import messages as m
from pannier.wire.tensors import encode_with, unpack
from pannier.wire.traffic import Traffic

RETRY_MS = 2
"""How soon a full queue is tried again."""
BATCH = 64
"""Messages taken from one peer or socket before the others are looked at."""


class Asker(Protocol):
    """A compute worker, as one that is answered."""

    @property
    def name(self) -> str:
        """Of the worker, which may have several connections."""

    def answer(self, reply: AttentionToCompute, tensors: list[torch.Tensor]) -> None:
        """Send, or keep until a flush. Raises `PeerGone`, and `WireError` for an answer that is too large."""


class Caller(Asker, Protocol):
    """A connection of a compute worker that is no ZeroMQ socket."""

    def receive(self) -> tuple[ComputeToAttention, list[torch.Tensor]] | None:
        """The next message, whose tensors stay until `release`. Raises `WireError` for what is none."""

    def release(self) -> None:
        """The memory of the message received last may be used again."""


@dataclass(frozen=True)
class ZmqAsker:
    """Whoever has this identity on the ZeroMQ socket."""

    identity: bytes
    send: Callable[[bytes, Frames], None]

    @property
    def name(self) -> str:
        """Of the worker."""
        return peer_of_flow(self.identity)

    def answer(self, reply: AttentionToCompute, tensors: list[torch.Tensor]) -> None:
        """Send, or keep until a flush. Raises `PeerGone`."""
        self.send(self.identity, encode_with(reply, tensors))


class AttentionWorker:
    """Serves compute workers on `endpoint`, behind `door` and at `tcp`, and obeys the gateway.

    `loop` is its data thread.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        name: str,
        core: AttentionCore,
        endpoint: str,
        options: SocketOptions,
        spin_us: int = SPIN_US,
        link_options: SocketOptions | None = None,
        listen_tcp: str | None = None,
        *,
        network: EmulatedNetwork | None = None,
        device: PacedDevice | None = None,
    ) -> None:
        """`network` and `device` are emulated; the core's calls are stretched by the latter."""
        self.core = core
        self._device = device
        self._network = network or (None if device is None else EmulatedNetwork())
        """Holds what is not there yet; None: what comes is served, and its answers sent, at once."""
        self._context = context
        self._name = name
        self._options = options
        self._spin_us = spin_us
        self._links, self.endpoint = bind(context, zmq.ROUTER, endpoint, link_options or options)
        self._traffic = Traffic()
        self._same_host = SameHost(self._traffic)
        self.door = self._same_host.address
        try:
            self._over_tcp = OverTcp(listen_tcp or beside(self.endpoint), link_options or options, self._traffic)
        except BaseException:
            self._same_host.close()
            close_bound(self._links, self.endpoint)
            raise
        self.tcp = self._over_tcp.address
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
        self._over_tcp.watch(waiting)
        if self._network is not None:
            waiting.register(self._network)
        try:
            while not stop.is_set():
                if self._network is not None:
                    self._network.deliver()
                ready = waiting.wait(None if self._flush() else RETRY_MS)
                if self._gateway in ready:
                    self._obey_gateway()
                if self._links in ready:
                    self._serve_links()
                for same_host in self._same_host.callers(ready):
                    self._serve_caller(same_host)
                for over_tcp in self._over_tcp.callers(ready):
                    self._serve_caller(over_tcp)
        finally:
            self._gateway.close()

    def counters(self) -> dict[str, float]:
        """What the gateway shows of this worker."""
        return {name: float(count) for name, count in {**self.core.counters, **self._traffic.counters()}.items()}

    def close(self) -> None:
        """Close the socket for links; what waits for peers is dropped."""
        self._outboxes.clear()
        if self._network is not None:
            self._network.close()
        self._same_host.close()
        self._over_tcp.close()
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
        asker, tensors = ZmqAsker(peer, self._send), unpack(getattr(message, "parts", ()), payload)
        if self._network is not None:
            self._bring(self._network, asker, message, tensors)
            return
        for reply, answer in self.core.receive(asker.name, message, tensors):
            self._answer(asker, reply, answer)

    def _serve_caller(self, caller: Caller) -> None:
        """The same for a peer whose tensors lie in shared memory, or in what its connection has read."""
        for _ in range(BATCH):
            try:
                received = caller.receive()
            except WireError:
                self.core.counters["refused_frames"] += 1
                continue
            if received is None:
                return
            if self._network is not None:
                message, tensors = received
                self._bring(self._network, caller, message, [tensor.clone() for tensor in tensors])
                caller.release()
                continue
            replies = list(self.core.receive(caller.name, *received))
            # By now the core has stored, attended to or copied all that it was given; before the answer is sent, so
            # that the lane finds its ring empty when it asks next.
            caller.release()
            for reply, answer in replies:
                self._answer(caller, reply, answer)

    def _bring(
        self, network: EmulatedNetwork, asker: Asker, message: ComputeToAttention, tensors: list[torch.Tensor]
    ) -> None:
        """Serve a message once an emulated network has brought it."""

        def serve() -> None:
            for reply, answer in self.core.receive(asker.name, message, tensors):
                ready_at = 0.0 if self._device is None else self._device.busy_until
                answer_it = partial(self._answer, asker, reply, answer)
                network.send((asker.name, "to compute"), answer, answer_it, ready_at)

        network.send((asker.name, "to attention"), tensors, serve)

    def _answer(self, asker: Asker, reply: AttentionToCompute, tensors: list[torch.Tensor]) -> None:
        """An answer for which there can't be room becomes a failure, with the reason."""
        try:
            asker.answer(reply, tensors)
        except PeerGone:
            self.core.counters["answers_to_lost_peers"] += 1
        except WireError as error:
            self._answer(asker, m.StepFailed(reply.life, reply.session, reply.step, reply.lane, str(error)), [])

    def _send(self, peer: bytes, frames: Frames) -> None:
        """Raises `PeerGone`."""
        outbox = self._outboxes.get(peer)
        if outbox is None:
            outbox = self._outboxes[peer] = Outbox(
                lambda waiting: self._links.send_multipart([peer, *waiting], zmq.NOBLOCK, copy=False)
            )
        try:
            outbox.put(frames)
        finally:
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
        flushed = [self._same_host.flush(), self._over_tcp.flush()]
        return all(flushed) and not self._outboxes and not len(self._to_gateway)
