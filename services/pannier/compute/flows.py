"""Several connections to one attention worker, used as one link: networks give one connection a part of their rate."""

from collections.abc import Sequence
from itertools import cycle

import zmq

from pannier.compute.link import Link, Received, Tensors
from pannier.net.shm import Waiting
from pannier.wire import ComputeToAttention
from pannier.wire import messages as m


class Flows:
    """Pieces take turns on all flows; what is small and rare (begin, end, abort) goes on the first.

    Nothing need arrive in order: an attention worker begins what it has the beginning of. It answers on the flow that
    brought what it answers, so a piece may be acknowledged after its step is; that is counted as stale, and no harm.
    """

    socket: "zmq.Socket[bytes] | None" = None

    def __init__(self, waiting: Waiting, flows: Sequence[Link]) -> None:
        self.name = flows[0].name
        self.kind = f"{flows[0].kind} x{len(flows)}"
        self._waiting = waiting
        self._flows = flows
        self._turns = cycle(flows)
        for flow in flows:
            if flow.socket is not None:
                waiting.register(flow.socket)

    def send(self, message: ComputeToAttention, tensors: Tensors) -> None:
        """Send, or keep until `flush`. Raises `PeerGone`."""
        flow = next(self._turns) if isinstance(message, m.Piece) else self._flows[0]
        flow.send(message, tensors)

    def receive(self) -> Received | None:
        """The next answer that has arrived on any flow. Raises `WireError`."""
        for flow in self._flows:
            received = flow.receive()
            if received is not None:
                return received
        return None

    def flush(self) -> bool:
        """Send what was kept; True if nothing is left."""
        left = [flow for flow in self._flows if not flow.flush()]
        return not left

    def close(self) -> None:
        """Close every flow; what was kept is dropped."""
        for flow in self._flows:
            if flow.socket is not None:
                self._waiting.unregister(flow.socket)
            flow.close()
