"""Sockets: the one place that makes them, and asyncio ends that carry typed messages over them."""

from pannier.net.connection import Connection
from pannier.net.errors import Exposed, NetError, PeerGone, PortBusy
from pannier.net.server import Server
from pannier.net.sockets import SocketOptions, bind, close_bound, connect

__all__ = [
    "Connection",
    "Exposed",
    "NetError",
    "PeerGone",
    "PortBusy",
    "Server",
    "SocketOptions",
    "bind",
    "close_bound",
    "connect",
]
