"""Compute workers whose messages come over plain TCP."""

from collections.abc import Iterator, Mapping
from typing import Any

import structlog
import torch

from pannier.net import SocketOptions
from pannier.net.shm import Waiting
from pannier.net.tcp import CannotTalk, Hello, Listener, Stream
from pannier.runtime.reused_memory import ReusedMemory
from pannier.runtime.tensor_stream import TensorStream
from pannier.wire import AttentionToCompute, ComputeToAttention
from pannier.wire.traffic import Traffic

log = structlog.get_logger()
LOOPBACK = "127.0.0.1"


class TcpCaller:
    """One connection of a compute worker, which may have several."""

    def __init__(self, stream: Stream, hello: Hello, traffic: Traffic) -> None:
        self.name = hello.name
        self.stream = stream
        self.flow = hello.flow
        self._messages: TensorStream[ComputeToAttention] = TensorStream(stream, ComputeToAttention, traffic)

    def receive(self) -> tuple[ComputeToAttention, list[torch.Tensor]] | None:
        """The next message, whose tensors stay until the next call. Raises `WireError` for what is none."""
        received = self._messages.receive()
        return None if received is None else received[:2]

    def release(self) -> None:
        """The memory of a message is used again when the next one is received."""

    def answer(self, reply: AttentionToCompute, tensors: list[torch.Tensor]) -> None:
        """Send, or keep until a flush. Raises `PeerGone`, and `WireError` for an answer that is too large."""
        self._messages.send(reply, tensors)


class OverTcp:
    """Where compute workers dial, and those who have: nobody where links are encrypted, which this is not."""

    def __init__(self, endpoint: str, options: SocketOptions, traffic: Traffic) -> None:
        """Raises `PortBusy`, `Exposed`, or `NetError` for an address that can't be bound."""
        self._traffic = traffic
        self._callers: list[TcpCaller] = []
        self._listener = None if options.curve is not None else Listener(endpoint, options, ReusedMemory)

    @property
    def address(self) -> str:
        """Where to dial, with the ticket; "" if there is no such place."""
        return "" if self._listener is None else self._listener.address

    def watch(self, waiting: Waiting) -> None:
        """Wait for whoever dials, and from then on for what they send."""
        self._waiting = waiting
        if self._listener is not None:
            waiting.register(self._listener)

    def callers(self, ready: Mapping[Any, int]) -> Iterator[TcpCaller]:
        """Those who have sent something. Lets in who has dialled, and forgets who has hung up."""
        if self._listener is not None and self._listener.fileno() in ready:
            self._let_in(self._listener)
        for caller in list(self._callers):
            if caller.stream.reader.is_ready:
                yield caller
            if caller.stream.is_lost:
                reason = caller.stream.reason
                log.info("a compute worker has hung up", worker=caller.name, flow=caller.flow, reason=reason)
                self._forget(caller)

    def flush(self) -> bool:
        """Send what was kept; True if nothing is left."""
        done = True
        for caller in self._callers:
            done &= caller.stream.flush()
        return done

    def close(self) -> None:
        """Hang up on everybody."""
        for caller in list(self._callers):
            self._forget(caller)
        if self._listener is not None:
            self._listener.close()

    def _let_in(self, listener: Listener) -> None:
        while True:
            try:
                accepted = listener.accept()
            except CannotTalk as error:
                log.warning("somebody was not let in", reason=str(error))
                continue
            if accepted is None:
                return
            new = TcpCaller(*accepted, self._traffic)
            # Who dials again has a new process, or a new session: what it had before is nobody's any more.
            for former in [caller for caller in self._callers if (caller.name, caller.flow) == (new.name, new.flow)]:
                self._forget(former)
            log.info("link", worker=new.name, kind="tcp", flow=new.flow)
            self._waiting.add_stream(new.stream)
            self._callers.append(new)

    def _forget(self, caller: TcpCaller) -> None:
        self._waiting.remove_stream(caller.stream)
        caller.stream.close()
        self._callers.remove(caller)


def beside(endpoint: str) -> str:
    """Where to listen for plain TCP: on the address of the links' endpoint, or within the host if that is a path."""
    host = endpoint.removeprefix("tcp://").rpartition(":")[0] if endpoint.startswith("tcp://") else LOOPBACK
    return f"tcp://{host}:0"
