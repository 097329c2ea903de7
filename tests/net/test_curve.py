"""Encrypted sockets: who has a known key comes in, and nobody else; asyncio's and blocking sockets alike."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import zmq
import zmq.asyncio

from pannier.net import Connection, Curve, KeysRefused, Server, SocketOptions, bind, close_bound, connect
from pannier.wire import GatewayToWorkerData, WorkerToGatewayData
from pannier.wire import messages as m

from .conftest import Run

pytestmark = pytest.mark.timeout(30)
GATEWAY, WORKER, STRANGER = (zmq.curve_keypair() for _ in range(3))
LOCKED = SocketOptions(curve=Curve(GATEWAY[1], {WORKER[0]}))
KNOWN = SocketOptions(curve=Curve(WORKER[1], {GATEWAY[0]}))
UNKNOWN = SocketOptions(curve=Curve(STRANGER[1], {GATEWAY[0]}))
MISTAKEN = SocketOptions(curve=Curve(WORKER[1], {STRANGER[0]}))
PLAIN = SocketOptions()


@asynccontextmanager
async def ends(
    context: zmq.asyncio.Context, endpoint: str, server_options: SocketOptions, peer_options: SocketOptions
) -> AsyncIterator[tuple[Server[Any], Connection[Any], "asyncio.Task[Any]"]]:
    """A server, who dials it and says something at once, and what arrives."""
    server: Server[Any] = Server(context, WorkerToGatewayData, endpoint, server_options)
    arrivals: Any = aiter(server)
    arriving = asyncio.create_task(anext(arrivals))
    peer: Connection[Any] = Connection(context, GatewayToWorkerData, server.endpoint, b"w0", peer_options)
    await peer.send(m.Join(5))
    try:
        yield server, peer, arriving
    finally:
        arriving.cancel()
        await asyncio.wait([arriving])
        await arrivals.aclose()
        peer.close()
        await server.close()


async def until_counted(server: Server[Any]) -> None:
    """Until the server has refused a handshake."""
    while not server.refused_handshakes:  # noqa: ASYNC110  # it is libzmq's event
        await asyncio.sleep(0.01)


def test_who_has_a_known_key_comes_in(context: zmq.asyncio.Context, endpoint: str, run: Run) -> None:
    """And is answered."""

    async def body() -> None:
        async with ends(context, endpoint, LOCKED, KNOWN) as (server, peer, arriving):
            assert (await arriving)[:2] == (b"w0", m.Join(5))
            server.send(b"w0", m.NewSession(1, 1))
            assert (await anext(aiter(peer)))[0] == m.NewSession(1, 1)
            assert server.refused_handshakes == 0

    run(body())


@pytest.mark.parametrize(
    ("options", "why"), [(UNKNOWN, "it doesn't know this key"), (PLAIN, "it asks for keys, and none were given")]
)
def test_nobody_else_comes_in(
    context: zmq.asyncio.Context, endpoint: str, run: Run, options: SocketOptions, why: str
) -> None:
    """Who is turned away is told why, the refusal is counted, and nothing of it arrives."""

    async def body() -> None:
        async with ends(context, endpoint, LOCKED, options) as (server, peer, arriving):
            with pytest.raises(KeysRefused, match=why):
                await peer.until_refused()
            await until_counted(server)
            assert not arriving.done()

    run(body())


def test_another_gateway_is_not_talked_to(context: zmq.asyncio.Context, endpoint: str, run: Run) -> None:
    """Who expects another key at the listening end says nothing to it."""

    async def body() -> None:
        async with ends(context, endpoint, LOCKED, MISTAKEN) as (server, _, arriving):
            await until_counted(server)
            assert not arriving.done()

    run(body())


def test_keys_are_not_given_up_for_a_peer_without(context: zmq.asyncio.Context, endpoint: str, run: Run) -> None:
    """Who was given keys never speaks in the clear."""

    async def body() -> None:
        async with ends(context, endpoint, PLAIN, KNOWN) as (_, peer, arriving):
            with pytest.raises(KeysRefused, match="it does not encrypt, and keys were given"):
                await peer.until_refused()
            assert not arriving.done()

    run(body())


def test_every_socket_of_a_context_has_peers_of_its_own(endpoint: str) -> None:
    """Blocking sockets too: a key that one lets in is refused by another, and a plain one beside asks for none."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    strangers = SocketOptions(curve=Curve(GATEWAY[1], {STRANGER[0]}))
    others = ["tcp://127.0.0.1:0"] * 2
    bound = [
        bind(context, zmq.ROUTER, address, options)
        for address, options in zip([endpoint, *others], (LOCKED, strangers, PLAIN), strict=True)
    ]
    dialling = [
        connect(context, zmq.DEALER, address, options, b"p")
        for (_, address), options in zip(bound, (KNOWN, KNOWN, PLAIN), strict=True)
    ]
    for socket in dialling:
        socket.send(b"hello")
    assert bound[0][0].recv_multipart() == [b"p", b"hello"]
    assert bound[2][0].recv_multipart() == [b"p", b"hello"]
    assert not bound[1][0].poll(200)
    for socket in dialling:
        socket.close()
    for socket, address in bound:
        close_bound(socket, address)
    context.term()


def test_a_context_can_be_followed_by_another() -> None:
    """The thread that answers for a context ends with it, and the next has its own."""
    for _ in range(20):
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        server, address = bind(context, zmq.ROUTER, "tcp://127.0.0.1:0", LOCKED)
        with connect(context, zmq.DEALER, address, KNOWN, b"p") as peer:
            peer.send(b"hello")
            assert server.recv_multipart() == [b"p", b"hello"]
        close_bound(server, address)
        started = time.monotonic()
        context.term()
        assert time.monotonic() - started < 5


def test_keys_allow_other_addresses(context: zmq.asyncio.Context) -> None:
    """Without saying insecure."""
    socket, endpoint = bind(context, zmq.ROUTER, "tcp://0.0.0.0:0", LOCKED)
    close_bound(socket, endpoint)
