"""One connection to a gateway, shared by all requests of a client and usable from every thread."""

import os
import threading
import warnings
from pathlib import Path
from typing import TypeAlias

from pannier.client.errors import ClientClosed
from pannier.client.exchange import CLOSED, Exchange, Order
from pannier.client.inbox import Inbox
from pannier.net import SocketOptions
from pannier.net.keys import client_keys
from pannier.wire import encode
from pannier.wire.messages import Detokenize, Generate, GetStatus, Tokenize

Question: TypeAlias = Generate | GetStatus | Tokenize | Detokenize
QUEUE = 1024
"""High-water mark: streams of many requests share the connection."""


def new_request() -> str:
    """A name for a request that no other has."""
    return os.urandom(8).hex()


class Line:
    """Hands orders to the thread that owns the socket.

    Raises `NetError` for an endpoint that can't be dialled, and for keys that can't be read.
    """

    def __init__(
        self, endpoint: str, connect_timeout_s: float, insecure: bool, keys: "str | os.PathLike[str] | None" = None
    ) -> None:
        self._stopped = True  # until there is a thread that could be stopped
        curve = None if keys is None else client_keys(Path(keys))
        options = SocketOptions(queue=QUEUE, insecure=insecure, curve=curve)
        self._exchange = Exchange(endpoint, connect_timeout_s, options)
        # The thread knows the exchange only, so that a line that nobody uses any more is collected, and stops it.
        self._thread = threading.Thread(target=self._exchange.run, name="pannier-client", daemon=True)
        self._thread.start()
        self._stopped = False

    def ask(self, message: Question, inbox: Inbox) -> None:
        """Send a request whose answers go to `inbox`. Raises `ClientClosed`, and `TypeError` for what can't be sent."""
        if self._stopped:
            raise ClientClosed(CLOSED)
        try:
            frames = encode(message)
        except (OverflowError, UnicodeEncodeError) as error:  # a number of over 64 bits, half a character
            raise TypeError(f"a parameter can't be sent: {error}") from error
        self._put(Order(message.request, frames, inbox))
        if self._exchange.ended:
            raise ClientClosed(CLOSED)

    def cancel(self, request: str) -> None:
        """End a request; one that has ended is fine. Safe in a finaliser."""
        self._put(Order(request, [], None))

    def stop(self) -> None:
        """End all requests and the thread, without waiting for it. Safe in a finaliser."""
        self._stopped = True
        self._put(None)

    def close(self) -> None:
        """End all requests and the thread; again is fine."""
        self.stop()
        self._thread.join()

    def _put(self, order: Order | None) -> None:
        self._exchange.orders.put(order)
        self._exchange.ring()

    def __del__(self) -> None:
        if not self._stopped:
            warnings.warn("a client was not closed", ResourceWarning, stacklevel=2)
            self.stop()
