"""The thread that owns a client's socket: everything goes out and comes in here."""

import contextlib
import math
import os
import socket
import time
from collections import deque
from collections.abc import Iterable
from queue import Empty, SimpleQueue
from typing import NamedTuple

import zmq

from pannier.client.errors import ClientClosed, ClientError, ProtocolMismatch, Unreachable
from pannier.client.inbox import Inbox
from pannier.net import Monitor, News, SocketOptions, connect
from pannier.wire import Buffer, Decoder, GatewayToClient, WireError, encode
from pannier.wire.messages import Cancel, Delta, GetStatus

GREETING = "greeting"
"""Request of the first question to a gateway. Only when something has answered are requests sent."""

CLOSED = "the client is closed"
BROKEN_OFF = "what listens there breaks every connection off; its keys and this client's may not fit"
FAREWELL_MS = 200
"""How long closing waits for cancellations to go out."""


class Order(NamedTuple):
    """What the client wants sent. With an inbox it is a request; without one, it ends the request."""

    request: str
    frames: list[Buffer]
    inbox: Inbox | None


class Waiting(NamedTuple):
    """Frames that wait for a gateway that answers, until `deadline` on the monotonic clock."""

    deadline: float
    request: str
    frames: list[Buffer]


class Exchange:
    """Sends the orders of any thread, gives every answer to its request's inbox, and fails all when the peer is lost.

    Requests wait here until the gateway has answered the greeting, at most `connect_timeout_s`, so that none is kept
    by ZeroMQ for a gateway that starts when nobody waits for the answer any more.
    """

    def __init__(self, endpoint: str, connect_timeout_s: float, options: SocketOptions) -> None:
        self.orders: SimpleQueue[Order | None] = SimpleQueue()
        self.ended = False
        self._endpoint = endpoint
        self._connect_timeout_s = connect_timeout_s
        self._context = zmq.Context()
        self._monitor = Monitor()
        name = b"client-" + os.urandom(8)
        try:
            self._dealer = connect(self._context, zmq.DEALER, endpoint, options, name, self._monitor)
        except BaseException:
            self._context.term()
            raise
        self._bell, self._bell_rope = socket.socketpair()
        self._bell.setblocking(False)
        self._bell_rope.setblocking(False)
        self._poller = zmq.Poller()
        self._poller.register(self._bell, zmq.POLLIN)
        self._poller.register(self._monitor.socket, zmq.POLLIN)
        self._decoder: Decoder[GatewayToClient] = Decoder(GatewayToClient)
        self._inboxes: dict[str, Inbox] = {}
        self._waiting: deque[Waiting] = deque()
        self._greeted = False
        self._answers = False
        self._hung_up = False
        """The gateway has refused this client's keys, and nothing dials it any more."""
        self._broken_off = False
        """The last connection ended before it was one."""

    def ring(self) -> None:
        """Say that there are orders. From any thread, and from a finaliser in the middle of anything: takes no lock."""
        with contextlib.suppress(OSError):  # full: it rings already; closed: the thread has ended
            self._bell_rope.send(b"\0")

    def run(self) -> None:
        """Serve until an order is None."""
        try:
            while self._take_orders():
                self._send_waiting()
                self._wait()
                news = self._monitor.news()
                self._receive()  # first what came before the loss
                self._hear(news)
                self._expire()
        finally:
            self._end()

    def _take_orders(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            self._bell.recv(4096)
        with contextlib.suppress(Empty):
            while (order := self.orders.get_nowait()) is not None:
                self._take(order)
            return False
        return True

    def _take(self, order: Order) -> None:
        if order.inbox is not None:
            self._inboxes[order.request] = order.inbox
            self._enqueue(order.request, order.frames)
        elif self._inboxes.pop(order.request, None) is not None:
            self._withdraw(order.request)

    def _withdraw(self, request: str) -> None:
        """Forget a request that was not sent; cancel one that was."""
        unsent = next((waiting for waiting in self._waiting if waiting.request == request), None)
        if unsent is None:
            self._enqueue(request, encode(Cancel(request)))
        else:
            self._waiting.remove(unsent)

    def _enqueue(self, request: str, frames: list[Buffer]) -> None:
        if self._hung_up:
            self._dial_again()
        self._waiting.append(Waiting(time.monotonic() + self._connect_timeout_s, request, frames))

    def _send_waiting(self) -> None:
        with contextlib.suppress(zmq.Again):
            if self._waiting and not self._greeted:
                self._dealer.send_multipart(encode(GetStatus(GREETING)), zmq.NOBLOCK)
                self._greeted = True
            while self._waiting and self._answers:
                self._dealer.send_multipart(self._waiting[0].frames, zmq.NOBLOCK)
                self._waiting.popleft()

    def _wait(self) -> None:
        writes = self._waiting and self._answers
        self._poller.register(self._dealer, zmq.POLLIN | zmq.POLLOUT if writes else zmq.POLLIN)
        left_s = self._waiting[0].deadline - time.monotonic() if self._waiting else None
        self._poller.poll(None if left_s is None else max(0, math.ceil(left_s * 1000)))

    def _receive(self) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                frames = self._dealer.recv_multipart(zmq.NOBLOCK)
                try:
                    message, _ = self._decoder.decode(frames)
                except WireError as error:
                    self._fail(ProtocolMismatch(f"{self._endpoint} is no gateway of this version: {error}"))
                else:
                    self._answers, self._broken_off = True, False
                    self._deliver(message)

    def _deliver(self, message: GatewayToClient) -> None:
        inbox = self._inboxes.get(message.request)
        if inbox is None:
            return  # the greeting's answer, or of a request that was cancelled meanwhile
        ends = not isinstance(message, Delta) or message.usage is not None
        if ends:
            del self._inboxes[message.request]
        if not inbox.put(message) and not ends:
            self._take(Order(message.request, [], None))

    def _hear(self, news: News) -> None:
        if news.lost:
            self._lose()
        if news.failed_handshakes:
            self._broken_off = True
        if news.refusal is not None:
            self._hung_up = True
            while self._waiting:
                self._fail(Unreachable(self._endpoint, news.refusal), [self._waiting.popleft().request])

    def _dial_again(self) -> None:
        """Keys may have been given to the gateway meanwhile."""
        with contextlib.suppress(zmq.ZMQError):
            self._dealer.disconnect(self._endpoint)
        self._dealer.connect(self._endpoint)
        self._hung_up = self._greeted = False

    def _lose(self) -> None:
        """The gateway forgets what it was sent; should it come back, because only the network was gone, it is told."""
        self._greeted = self._answers = False
        unsent = {waiting.request for waiting in self._waiting}
        sent = self._inboxes.keys() - unsent
        self._fail(Unreachable(self._endpoint, "the gateway has gone"), sent)
        for request in sent:
            self._enqueue(request, encode(Cancel(request)))

    def _expire(self) -> None:
        now = time.monotonic()
        while self._waiting and self._waiting[0].deadline <= now:
            error = Unreachable(self._endpoint, BROKEN_OFF) if self._broken_off else Unreachable(self._endpoint)
            self._fail(error, [self._waiting.popleft().request])

    def _fail(self, error: ClientError, requests: Iterable[str] | None = None) -> None:
        """End these requests, or all."""
        for request in list(self._inboxes) if requests is None else requests:
            inbox = self._inboxes.pop(request, None)
            if inbox is not None:
                inbox.put(error)

    def _end(self) -> None:
        if self._answers:
            self._say_farewell()
        self._fail(ClientClosed(CLOSED))
        self._monitor.close()
        self._dealer.close()
        self._bell.close()
        self._bell_rope.close()
        self._context.term()
        self.ended = True
        self._refuse_orders()

    def _say_farewell(self) -> None:
        for request in list(self._inboxes):
            self._withdraw(request)
        self._dealer.setsockopt(zmq.LINGER, FAREWELL_MS)
        self._send_waiting()

    def _refuse_orders(self) -> None:
        with contextlib.suppress(Empty):
            while True:
                order = self.orders.get_nowait()
                if order is not None and order.inbox is not None:
                    order.inbox.put(ClientClosed(CLOSED))
