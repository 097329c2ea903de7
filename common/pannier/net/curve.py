"""Encryption: who may be at the other end of a socket, and the thread that libzmq asks about each who dials (ZAP)."""

import threading
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils import z85

ZAP = "inproc://zeromq.zap.01"
WELCOME, UNKNOWN = (b"200", b"welcome"), (b"400", b"unknown key")


@dataclass(frozen=True)
class Curve:
    """One end of encrypted connections: its own secret key, and the public keys of who may be at the other, in Z85."""

    secret: bytes
    peers: AbstractSet[bytes]


def lock(socket: "zmq.Socket[Any]", curve: Curve) -> None:
    """Have a socket that will be bound let in the peers only."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, curve.secret)
    socket.setsockopt(zmq.ZAP_DOMAIN, _doorkeeper(socket.context).let_in(curve.peers))


def unlock(socket: "zmq.Socket[Any]", curve: Curve) -> None:
    """Have a socket that will dial show its own key, and talk to the one peer only."""
    (peer,) = curve.peers
    socket.setsockopt(zmq.CURVE_SECRETKEY, curve.secret)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(curve.secret))
    socket.setsockopt(zmq.CURVE_SERVERKEY, peer)


class Doorkeeper:
    """The thread of one context that says who may come in. It ends with the context.

    libzmq lets everybody in for as long as nobody answers at `ZAP`, so it is there before any socket is bound.
    """

    def __init__(self, context: "zmq.Context[Any]") -> None:
        self._context_id = context.underlying
        self._peers: dict[bytes, AbstractSet[bytes]] = {}
        self._socket = context.socket(zmq.REP, socket_class=zmq.Socket)  # a blocking one, also among asyncio's
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(ZAP)
        threading.Thread(target=self._answer, name="pannier-doorkeeper", daemon=True).start()

    def let_in(self, peers: AbstractSet[bytes]) -> bytes:
        """The ZAP domain in which these keys, and no others, are known."""
        domain = b"%d" % len(self._peers)
        self._peers[domain] = peers
        return domain

    def _answer(self) -> None:
        try:
            while True:
                _, request, domain, _, _, mechanism, *credentials = self._socket.recv_multipart()
                known = mechanism == b"CURVE" and z85.encode(credentials[0]) in self._peers[domain]
                self._socket.send_multipart([b"1.0", request, *(WELCOME if known else UNKNOWN), b"", b""])
        except zmq.ContextTerminated:
            pass
        finally:
            del _doorkeepers[self._context_id]  # first: once the socket is closed, a new context may have this number
            self._socket.close()


_doorkeepers: dict[int, Doorkeeper] = {}
_lock = threading.Lock()


def _doorkeeper(context: "zmq.Context[Any]") -> Doorkeeper:
    with _lock:
        found = _doorkeepers.get(context.underlying)
        if found is None:
            found = _doorkeepers[context.underlying] = Doorkeeper(context)
        return found
