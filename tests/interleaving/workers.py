"""Worker processes of the simulation: the real cores, and around them what their sockets' loops do."""

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from pannier.attention.core import AttentionCore
from pannier.compute.core import ComputeCore
from pannier.compute.link import Received, Tensors
from pannier.slicer import WHOLE, Stage
from pannier.wire import ComputeToAttention, StageToStage
from pannier.wire import messages as m

from .channels import Channel, Process
from .stamp_model import StampModel
from .watch import Watch, WatchedCache


class Network(Protocol):
    """What a worker needs of the world around it."""

    watch: Watch

    def channel(
        self, name: str, deliver: Callable[[Any, Tensors], None], receiver: Process | None, *, ordered: bool
    ) -> Channel:
        """A new channel."""

    def to_gateway(self, name: str, kind: str) -> Channel:
        """A new channel to the gateway's `control` or `data`."""

    def attention(self, name: str) -> "AttentionProcess | None":
        """The process of that name that lives now."""

    def compute(self, name: str) -> "ComputeProcess | None":
        """The process of that name that lives now."""


class Worker(Process):
    """One process from its start to its end; its successor has the same name."""

    def __init__(self, network: Network, hello: m.Hello) -> None:
        super().__init__(hello.name)
        self.network = network
        self.life = 0
        self.control_out = network.to_gateway(self.name, "control")
        self.data_out = network.to_gateway(self.name, "data")
        self.control_in = network.channel(f"control to {self.name}", self._hear, self, ordered=True)
        self.data_in = network.channel(f"data to {self.name}", self._obey, self, ordered=True)
        self.control_out.send(hello)

    @property
    def has_joined(self) -> bool:
        """Whether its data thread has dialled the gateway."""
        return self.life != 0

    def beat(self) -> None:
        """Show that it lives."""
        if self.has_joined:
            self.control_out.send(m.Heartbeat(self.life, {}))

    def _hear(self, message: m.Welcome | m.Refused | m.Heartbeat | m.Goodbye, _: Tensors) -> None:
        match message:
            case m.Welcome():
                self.life = message.life
                self.data_out.send(m.Join(message.life))
            case m.Refused() | m.Goodbye():
                self.is_alive = False

    def _obey(self, message: Any, tensors: Tensors) -> None:
        raise NotImplementedError


class AttentionProcess(Worker):
    """An attention worker."""

    def __init__(self, network: Network, hello: m.Hello) -> None:
        super().__init__(network, hello)
        self.core = AttentionCore(torch.device("cpu"), self._make_cache)
        self._answers: dict[str, Channel] = {}

    @property
    def group(self) -> int | None:
        """The group that it belongs to, as far as it knows."""
        return self.core.shard.assign.group if self.core.shard is not None else None

    def fail_next(self) -> None:
        """Have the next read or write run out of memory."""
        if self.core.shard is not None:
            assert isinstance(self.core.shard.cache, WatchedCache)
            self.core.shard.cache.fails_next = True

    def serve(self, compute: str, message: ComputeToAttention, tensors: Tensors) -> None:
        """Take a frame of a link, and answer."""
        stale = self.core.counters["stale_frames"]
        for reply, answer in self.core.receive(compute, message, tensors):
            if isinstance(reply, m.Answer | m.PieceWritten):
                assert self.group is not None
                self.network.watch.used(self.group, reply.step)
            self._answer(compute, reply, answer)
        if self.core.counters["stale_frames"] > stale:
            self.network.watch.refused(self.group, message)

    def _answer(self, compute: str, reply: Any, tensors: Tensors) -> None:
        if compute not in self._answers:

            def deliver(message: Any, tensors: Tensors) -> None:
                peer = self.network.compute(compute)
                if peer is not None:
                    peer.take_answer(self.name, message, tensors)

            peer = self.network.compute(compute)
            name = f"answers of {self.name} to {compute}"
            self._answers[compute] = self.network.channel(name, deliver, peer, ordered=False)
        channel = self._answers[compute]
        channel.receiver = self.network.compute(compute)
        channel.send(reply, tensors)

    def _obey(self, message: Any, _: Tensors) -> None:
        match message:
            case m.AttentionAssign():
                self._assigned = message.group
                self.core.assign(message)
                self.data_out.send(m.Ready(message.life, message.group, 0, ""))
            case m.Fence():
                self.data_out.send(self.core.fence(message))

    def _make_cache(self, *args: Any) -> WatchedCache:
        cache = WatchedCache(*args)
        self.network.watch.has_cache(self._assigned, cache)
        return cache


class SimulatedLink:
    """A compute worker's end of a link whose frames wait in the simulated network."""

    def __init__(self, network: Network, compute: str, address: m.ShardAddress) -> None:
        self.name, self.kind = address.name, "simulated"
        self.is_up = True
        self.lost: str | None = None
        self.is_open = True

        def deliver(message: Any, tensors: Tensors) -> None:
            peer = network.attention(self.name)
            if peer is not None:
                peer.serve(compute, message, tensors)

        self.channel = network.channel(f"link of {compute} to {self.name}", deliver, None, ordered=False)
        self._network = network

    def send(self, message: ComputeToAttention, tensors: Tensors) -> None:
        """Put a frame on its way; to whom, is seen when it arrives."""
        assert self.is_open
        self.channel.receiver = self._network.attention(self.name)
        self.channel.send(message, tensors)

    def receive(self) -> Received | None:
        """Nothing waits here: frames are delivered from outside."""
        return None

    def flush(self) -> bool:
        """Nothing is kept."""
        return True

    def close(self) -> None:
        """What was sent may arrive all the same."""
        self.is_open = False


class ComputeProcess(Worker):
    """A compute worker."""

    def __init__(self, network: Network, hello: m.Hello, model: StampModel, num_lanes: int, stage: Stage) -> None:
        super().__init__(network, hello)
        pass_on = None if stage == WHOLE else self._pass_on
        self.core = ComputeCore(model, num_lanes, self._connect, self.data_out.send, stage=stage, pass_on=pass_on)
        self.can_advance = False
        self._next_stage: Channel | None = None

    def advance(self) -> None:
        """Resume what can go on."""
        self.can_advance = self.core.advance()

    def take_answer(self, attention: str, message: Any, tensors: Tensors) -> None:
        """A frame has come back over the present link to an attention worker; without one nobody hears it."""
        link = self.core.links.get(attention)
        if link is not None:
            self.core.receive(link, message, tensors)
            self.can_advance = True

    def _obey(self, message: Any, tensors: Tensors) -> None:
        if isinstance(message, m.ComputeAssign) and message.next_stage is not None:
            self._dial(message.next_stage.name)
        self.core.obey(message, tensors)
        self.can_advance = True

    def _dial(self, name: str) -> None:
        peer = self.network.compute(name)

        def deliver(message: Any, tensors: Tensors) -> None:
            if peer is not None:
                peer.core.receive_from_stage(message, tensors)
                peer.can_advance = True

        self._next_stage = self.network.channel(f"stage link of {self.name} to {name}", deliver, peer, ordered=True)

    def _pass_on(self, message: StageToStage, tensors: Tensors) -> None:
        assert self._next_stage is not None
        self.network.watch.counts["passed on"] += 1
        self._next_stage.send(message, tensors)

    def _connect(self, address: m.ShardAddress) -> SimulatedLink:
        return SimulatedLink(self.network, self.name, address)


AnyWorker = AttentionProcess | ComputeProcess


def running(workers: Iterable[AnyWorker]) -> list[AnyWorker]:
    """Those that are neither stopped nor at an end."""
    return [worker for worker in workers if worker.is_running]
