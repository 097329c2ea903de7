"""The kinds of link that `pannier bench link` measures, each to an attention worker of the other process."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple, TypeAlias

import zmq

from pannier.compute.flows import Flows
from pannier.compute.link import Link, ZmqLink
from pannier.compute.shm_link import ShmLink
from pannier.compute.tcp_link import TcpLink
from pannier.net import SocketOptions
from pannier.net.flows import flow_names
from pannier.net.shm import SPIN_US, Layout, Waiting
from pannier.wire.messages import ShardAddress

PAGE = 4096
NAME = "bench"
OPTIONS = SocketOptions(max_bytes=1 << 30)
Places: TypeAlias = Mapping[str, Mapping[str, str]]
"""Where the workers of the other process are: those that listen on "tcp" or "ipc", and one that never spins."""


class Kind(NamedTuple):
    """One row of the table."""

    name: str
    place: str
    flows: int


def kinds(flows: int) -> list[Kind]:
    """All of them; those over a network also with several flows."""
    several = [Kind(f"{name} x{flows}", "tcp", flows) for name in ("tcp", "zmq tcp")] if flows > 1 else []
    return [
        Kind("tcp", "tcp", 1),
        Kind("tcp asleep", "asleep", 1),
        Kind("zmq tcp", "tcp", 1),
        *several,
        Kind("zmq ipc", "ipc", 1),
        Kind("shm", "ipc", 1),
        Kind("shm asleep", "asleep", 1),
    ]


def open_links(
    context: "zmq.Context[zmq.Socket[bytes]]", places: Places, room: int, flows: int
) -> Iterator[tuple[str, Link, Waiting]]:
    """One after the other, with what waits for it; `room` are bytes for all that is under way at once."""
    for kind in kinds(flows):
        at = places[kind.place]
        address = ShardAddress(kind.name, at["endpoint"], (), at["door"], at["tcp"])
        waiting = Waiting(0 if kind.place == "asleep" else SPIN_US)
        if kind.name.startswith("shm"):
            if not at["door"]:
                continue  # without the compiled part there is none
            layout = Layout(1, (-(-room // PAGE) * PAGE,) * 2)
            yield kind.name, ShmLink(waiting, NAME, address, layout), waiting
        else:
            yield kind.name, _over_network(context, kind, address, waiting, room), waiting


def _over_network(
    context: "zmq.Context[zmq.Socket[bytes]]", kind: Kind, address: ShardAddress, waiting: Waiting, room: int
) -> Link:
    links: list[Link]
    name = f"{NAME}-{kind.flows}"  # of its own, else the next link from here would take this one's place
    if kind.name.startswith("tcp"):
        links = [TcpLink(waiting, name, address, (room, room), OPTIONS, flow) for flow in range(kind.flows)]
    else:
        links = [ZmqLink(context, waiting, flow, address, OPTIONS) for flow in flow_names(name, kind.flows)]
    return links[0] if kind.flows == 1 else Flows(links)
