"""Addresses of plain TCP: `tcp://HOST:PORT/TICKET`, and the sockets behind them."""

import errno
import socket
from typing import NamedTuple

from pannier.net.errors import NetError, PortBusy
from pannier.net.sockets import SocketOptions, check_exposure
from pannier.net.tcp.errors import CannotTalk

BACKLOG = 64
MAX_PORT = 65535


class Address(NamedTuple):
    """Where a process listens, and what it wants to be told."""

    host: str
    port: int
    ticket: str

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}/{self.ticket}"

    @property
    def endpoint(self) -> str:
        """Without the ticket, as people may see it."""
        return str(self).rpartition("/")[0]


def parse(address: str) -> Address:
    """Raises `NetError` for what is no address."""
    scheme, _, rest = address.partition("://")
    endpoint, _, ticket = rest.partition("/")
    host, _, port = endpoint.rpartition(":")
    if scheme != "tcp" or not host or not port.isdecimal() or int(port) > MAX_PORT:
        raise NetError(f"{address!r} is not an address; write tcp://HOST:PORT")
    return Address(host.strip("[]"), int(port), ticket)


def listen(endpoint: str, options: SocketOptions) -> socket.socket:
    """A listening socket. Raises `PortBusy`, `Exposed`, `CannotTalk`, or `NetError` for what can't be bound."""
    _check(endpoint, options)
    host, port, _ = parse(endpoint)
    host = "" if host == "*" else host
    try:
        return socket.create_server((host, port), family=_family(host), backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortBusy(f"{endpoint} is in use by another process; stop it or choose another address") from error
        raise NetError(f"can't listen on {endpoint}: {error}") from error


def connect(address: Address, options: SocketOptions) -> socket.socket:
    """A socket that is about to be connected. Raises `Exposed`, `CannotTalk`, or `NetError` if that is impossible."""
    _check(address.endpoint, options)
    connecting = socket.socket(_family(address.host), socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        connecting.connect((address.host, address.port))
    except BlockingIOError:
        pass  # it goes on while others do, and fails where it is used
    except OSError as error:
        connecting.close()
        raise NetError(f"can't dial {address.endpoint}: {error}") from error
    return connecting


def _check(endpoint: str, options: SocketOptions) -> None:
    if options.curve is not None:
        raise CannotTalk(f"plain TCP at {endpoint} is not encrypted, and links are to be")
    check_exposure(endpoint, options)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
