"""Sockets: the one place that makes them, and asyncio ends that carry typed messages over them."""

from pannier.net.connection import Connection
from pannier.net.curve import Curve
from pannier.net.errors import BadKeys, Exposed, KeysRefused, NetError, PeerGone, PortBusy
from pannier.net.monitor import Monitor, News
from pannier.net.server import Server
from pannier.net.sockets import SocketOptions, bind, close_bound, connect

__all__ = [
    "BadKeys",
    "Connection",
    "Curve",
    "Exposed",
    "KeysRefused",
    "Monitor",
    "NetError",
    "News",
    "PeerGone",
    "PortBusy",
    "Server",
    "SocketOptions",
    "bind",
    "close_bound",
    "connect",
]
