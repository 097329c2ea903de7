"""Several connections to one attention worker, used as one link: networks give one connection a part of their rate."""

from collections.abc import Sequence
from itertools import cycle

from pannier.compute.link import Link, Received, Tensors
from pannier.wire import ComputeToAttention
from pannier.wire import messages as m


class Flows:
    """Pieces take turns on all flows; what is small and rare (begin, end, abort) goes on the first.

    Nothing need arrive in order: an attention worker begins what it has the beginning of. It answers on the flow that
    brought what it answers, so a piece may be acknowledged after its step is; that is counted as stale, and no harm.
    """

    def __init__(self, flows: Sequence[Link]) -> None:
        self.name = flows[0].name
        self.kind = f"{flows[0].kind} x{len(flows)}"
        self._flows = flows
        self._turns = cycle(flows)

    @property
    def is_up(self) -> bool:
        """Whether the other end has answered on all of them."""
        return all(flow.is_up for flow in self._flows)

    @property
    def lost(self) -> str | None:
        """Why one of them, and with it the link, is lost."""
        return next((flow.lost for flow in self._flows if flow.lost is not None), None)

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
            flow.close()
