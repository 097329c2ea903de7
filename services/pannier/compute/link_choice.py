"""Which kind of link reaches an attention worker: the fastest that both ends allow.

========  ====================================================================
shm       both are on one host: shared memory
tcp       plain TCP, where links are not encrypted
zmq       ZeroMQ: over TCP with encryption or without, or over a socket in a folder
========  ====================================================================
"""

from collections.abc import Sequence
from dataclasses import dataclass

import zmq

from pannier.compute.flows import Flows
from pannier.compute.link import Link, ZmqLink
from pannier.compute.link_sizes import LinkSizes, link_sizes
from pannier.compute.shm_link import ShmLink, layout
from pannier.compute.tcp_link import TcpLink
from pannier.net import SocketOptions
from pannier.net.flows import flow_names
from pannier.net.shm import CannotShare, Waiting
from pannier.net.tcp import CannotTalk
from pannier.runtime.config import LinkKind
from pannier.slicer import SlicedModel
from pannier.wire import messages as m
from pannier.wire.traffic import Traffic


@dataclass(frozen=True)
class LinkChoice:
    """How one compute worker, named `compute`, makes its links; `waiting` waits for all of them."""

    context: "zmq.Context[zmq.Socket[bytes]]"
    waiting: Waiting
    compute: str
    model: SlicedModel
    num_lanes: int
    wanted: LinkKind
    flows: int
    options: SocketOptions
    traffic: Traffic

    def connect(self, address: m.ShardAddress, assign: m.ComputeAssign, itemsize: int) -> tuple[Link, str]:
        """A link to another process, and why it is not of a faster kind; an element of a tensor has `itemsize` bytes.

        Raises `CannotShare` or `CannotTalk` if nothing but what can't be is wanted, or `NetError`.
        """
        try:
            return self._share_memory(address, assign, itemsize), "it is on this host"
        except CannotShare as error:
            if self.wanted == "shm":
                raise
            reason = str(error)
        try:
            return self._dial_tcp(address, assign, itemsize), reason
        except CannotTalk as error:
            if self.wanted == "tcp":
                raise
            return self._dial_zmq(address), reason if str(error) == reason else f"{reason}; {error}"

    def _share_memory(self, address: m.ShardAddress, assign: m.ComputeAssign, itemsize: int) -> Link:
        """Raises `CannotShare`, also if that isn't wanted."""
        if self.wanted not in ("auto", "shm"):
            raise CannotShare(f"link is set to {self.wanted}")
        if not address.door:
            raise CannotShare(f"{address.name} offers no shared memory")
        sizes = layout(self._sizes(address, assign, itemsize), self.num_lanes)
        return ShmLink(self.waiting, self.compute, address, sizes, self.traffic)

    def _dial_tcp(self, address: m.ShardAddress, assign: m.ComputeAssign, itemsize: int) -> Link:
        """Raises `CannotTalk`, also if that isn't wanted."""
        if self.wanted not in ("auto", "tcp"):
            raise CannotTalk(f"link is set to {self.wanted}")
        if not address.tcp:
            raise CannotTalk(f"{address.name} offers no plain TCP")
        largest, flows = self._sizes(address, assign, itemsize).largest, range(self.flows)
        return _as_one(
            [TcpLink(self.waiting, self.compute, address, largest, self.options, flow, self.traffic) for flow in flows]
        )

    def _dial_zmq(self, address: m.ShardAddress) -> Link:
        names = flow_names(self.compute, self.flows)
        shared = self.context, self.waiting
        return _as_one([ZmqLink(*shared, name, address, self.options, self.traffic) for name in names])

    def _sizes(self, address: m.ShardAddress, assign: m.ComputeAssign, itemsize: int) -> LinkSizes:
        return link_sizes(assign, address.heads, self.model.calls, itemsize, self.model.max_model_len)


def _as_one(links: Sequence[Link]) -> Link:
    return links[0] if len(links) == 1 else Flows(links)
