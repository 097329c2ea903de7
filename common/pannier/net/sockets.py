"""The only place where ZeroMQ sockets are made."""

import ipaddress
import os
import socket as plain
import stat
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import zmq

from pannier.net.curve import Curve, lock, unlock
from pannier.net.errors import Exposed, NetError, PortBusy
from pannier.net.monitor import Monitor

DIAL_S = 15.0
"""How long a dialled host may be silent before it is dialled anew."""
S = TypeVar("S", bound="zmq.Socket[Any]")


@dataclass(frozen=True)
class SocketOptions:
    """What may differ from socket to socket; everything else is the same for all."""

    queue: int = 64
    """High-water mark in messages, each way."""
    max_bytes: int = 64 << 20
    """A larger frame ends the connection before memory is taken for it."""
    insecure: bool = False
    """Whether addresses that other hosts can reach are allowed."""
    buffer_bytes: int = 0
    """What the system may hold of a TCP connection, each way; 0: as much as it thinks fit."""
    curve: Curve | None = None
    """Keys; None: in the clear, with whoever is at the other end."""
    silence_s: float = 10.0
    """A connection on which nothing comes for so long has ended, and what was under way on it is lost."""


def bind(
    context: "zmq.Context[S]",
    kind: int,
    endpoint: str,
    options: SocketOptions = SocketOptions(),
    monitor: Monitor | None = None,
) -> tuple[S, str]:
    """Bind first, publish afterwards: the socket and its real endpoint (port 0 becomes the port it got).

    Raises `PortBusy`, `Exposed`, or `NetError` for an address that can't be bound.
    """
    check_exposure(endpoint, options)
    _remove_stale_socket_file(endpoint)
    socket = _make(context, kind, options)
    if options.curve is not None:
        lock(socket, options.curve)
    if monitor is not None:
        monitor.watch(socket, options.curve is not None)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        _close(socket, monitor)
        if error.errno == zmq.EADDRINUSE:
            raise PortBusy(f"{endpoint} is in use by another process; stop it or choose another address") from error
        raise NetError(f"can't listen on {endpoint}: {error.strerror}") from error
    return socket, socket.getsockopt_string(zmq.LAST_ENDPOINT)


def close_bound(socket: "zmq.Socket[Any]", endpoint: str) -> None:
    """Close a socket that `bind` made; libzmq leaves the socket file of an ipc endpoint behind."""
    path = endpoint.removeprefix("ipc://")
    if path != endpoint and not socket.closed:
        with suppress(FileNotFoundError):
            os.unlink(path)
    socket.close()


def connect(
    context: "zmq.Context[S]",
    kind: int,
    endpoint: str,
    options: SocketOptions = SocketOptions(),
    identity: bytes | None = None,
    monitor: Monitor | None = None,
) -> S:
    """A socket that dials `endpoint`, now and again whenever the connection is lost."""
    check_exposure(endpoint, options)
    socket = _make(context, kind, options)
    if identity is not None:
        socket.setsockopt(zmq.IDENTITY, identity)
    if options.curve is not None:
        unlock(socket, options.curve)
    if monitor is not None:
        monitor.watch(socket, options.curve is not None)
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        _close(socket, monitor)
        raise NetError(f"can't connect to {endpoint}: {error.strerror}") from error
    return socket


def _close(socket: "zmq.Socket[Any]", monitor: Monitor | None) -> None:
    if monitor is not None:
        monitor.close()
    socket.close()


def _make(context: "zmq.Context[S]", kind: int, options: SocketOptions) -> S:
    socket: S = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, options.queue)
    socket.setsockopt(zmq.RCVHWM, options.queue)
    if options.buffer_bytes:
        socket.setsockopt(zmq.SNDBUF, options.buffer_bytes)
        socket.setsockopt(zmq.RCVBUF, options.buffer_bytes)
    socket.setsockopt(zmq.MAXMSGSIZE, options.max_bytes)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 2000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, round(options.silence_s * 1000))
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, round(DIAL_S * 1000))
    if kind == zmq.ROUTER:
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a restarted worker has its old name
    return socket


def check_exposure(endpoint: str, options: SocketOptions) -> None:
    """Raise `Exposed` if other hosts can reach `endpoint` and nothing allows that; `NetError` if it is none."""
    scheme, _, address = endpoint.partition("://")
    if scheme in ("ipc", "inproc") or options.insecure or options.curve is not None:
        return
    if scheme != "tcp" or ":" not in address:
        raise NetError(f"{endpoint!r} is not an endpoint; write tcp://HOST:PORT or ipc://PATH")
    if not _is_loopback(address.rpartition(":")[0]):
        raise Exposed(
            f"{endpoint} can be reached from other hosts, and the traffic is neither encrypted nor authenticated; "
            "use a loopback address, give keys (pannier keys makes them), or allow it with insecure on a network "
            "that is private"
        )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _remove_stale_socket_file(endpoint: str) -> None:
    """libzmq unlinks any file in its way, be it a letter or the socket of a live process; look first."""
    path = endpoint.removeprefix("ipc://")
    if path == endpoint or path.startswith("@") or not os.path.lexists(path):
        return
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise NetError(f"can't listen on {endpoint}: {path} is there already and is no socket")
    with plain.socket(plain.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
        except OSError as error:
            raise NetError(f"can't listen on {endpoint}: {path} is there already ({error.strerror})") from error
        else:
            raise PortBusy(f"{endpoint} is in use by another process; stop it or choose another address")
