"""Compute workers on the same host: their messages come through shared memory."""

from collections.abc import Iterator, Mapping
from typing import Any

import structlog
import torch

from pannier.net.errors import PeerGone
from pannier.net.shm import CannotShare, Channel, Door, Waiting
from pannier.runtime.tensor_channel import TensorChannel
from pannier.wire import AttentionToCompute, ComputeToAttention, WireError
from pannier.wire.traffic import Traffic

log = structlog.get_logger()


class ShmCaller:
    """One compute worker on this host."""

    def __init__(self, channel: Channel, traffic: Traffic) -> None:
        self.name = channel.peer
        self.channel = channel
        self.messages: TensorChannel[ComputeToAttention] = TensorChannel(channel, ComputeToAttention, traffic)

    def receive(self) -> tuple[ComputeToAttention, list[torch.Tensor]] | None:
        """The next message, whose tensors lie in its ring until `release`. Raises `WireError` for what is none."""
        received = self.messages.receive()
        if received is None:
            return None
        lane, message, tensors = received
        if message.lane != lane:
            self.messages.release()
            raise WireError(f"a message of lane {message.lane} came in the ring of lane {lane}")
        return message, tensors

    def release(self) -> None:
        """Give the memory of the message back to its sender."""
        self.messages.release()

    def answer(self, reply: AttentionToCompute, tensors: list[torch.Tensor]) -> None:
        """Send, or keep until a flush. Raises `PeerGone`, and `WireError` for an answer that is too large."""
        if self.channel.is_lost:
            raise PeerGone(f"{self.name} has hung up")
        self.messages.send(reply.lane, reply, tensors)


class SameHost:
    """The door that compute workers on this host knock at, and those who came in: nobody without the compiled part."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._callers: list[ShmCaller] = []
        self._door: Door | None = None
        try:
            self._door = Door()
        except CannotShare as error:
            log.warning("no shared memory: links within this host use sockets", reason=str(error))

    @property
    def address(self) -> str:
        """Where the door is; "" if there is none."""
        return "" if self._door is None else self._door.address

    def watch(self, waiting: Waiting) -> None:
        """Wait for whoever knocks, and from then on for what they send."""
        self._waiting = waiting
        if self._door is not None:
            waiting.register(self._door.fileno())

    def callers(self, ready: Mapping[Any, int]) -> Iterator[ShmCaller]:
        """Those who are there. Lets in who knocks, and forgets who has hung up."""
        if self._door is not None and self._door.fileno() in ready:
            self._let_in(self._door)
        for caller in [caller for caller in self._callers if caller.channel.is_lost]:
            log.info("a compute worker has hung up", worker=caller.name)
            self._forget(caller)
        yield from list(self._callers)

    def flush(self) -> bool:
        """Send what was kept; True if nothing is left."""
        kept = [caller for caller in self._callers if not caller.messages.flush()]
        return not kept

    def close(self) -> None:
        """Hang up on everybody."""
        for caller in list(self._callers):
            self._forget(caller)
        if self._door is not None:
            self._door.close()

    def _let_in(self, door: Door) -> None:
        while True:
            try:
                channel = door.open()
            except CannotShare as error:
                log.warning("somebody was not let in", reason=str(error))
                continue
            if channel is None:
                return
            # Who comes again has a new process, or a new session: what it had before is nobody's any more.
            for former in [caller for caller in self._callers if caller.name == channel.peer]:
                self._forget(former)
            log.info("link", worker=channel.peer, kind="shm", bytes=channel.memory.layout.total)
            self._waiting.add(channel)
            self._callers.append(ShmCaller(channel, self._traffic))

    def _forget(self, caller: ShmCaller) -> None:
        self._waiting.remove(caller.channel)
        caller.messages.close()
        self._callers.remove(caller)
