"""A server and its peers over real sockets: what arrives, what is lost, and who waits for whom (nobody)."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import zmq
import zmq.asyncio

from pannier.net import Connection, PeerGone, Server, SocketOptions, bind, close_bound, connect
from pannier.net.outbox import CAPACITY
from pannier.net.server import BATCH
from pannier.wire import (
    Dtype,
    GatewayToWorkerData,
    WireError,
    WorkerToGateway,
    WorkerToGatewayData,
    encode,
    lay_out,
    payload_bytes,
)
from pannier.wire import messages as m

from .conftest import Run, terminates

pytestmark = pytest.mark.timeout(30)
NARROW = SocketOptions(queue=1)
PARTS = lay_out([(Dtype.INT8, (256 << 10,))])
PAYLOAD = bytes(payload_bytes(PARTS))
"""As large as a socket's buffers, so that a few fill every queue."""


def step(number: int) -> m.Step:
    return m.Step(1, 1, number, 0, (), (), (), (), (), (), PARTS)


@asynccontextmanager
async def serving(
    context: zmq.asyncio.Context, endpoint: str, options: SocketOptions = SocketOptions()
) -> AsyncIterator[tuple[Server[Any], "asyncio.Queue[Any]"]]:
    """A server whose messages are put on a queue by its one receiving task."""
    server: Server[Any] = Server(context, WorkerToGatewayData, endpoint, options)
    arrived: asyncio.Queue[Any] = asyncio.Queue()

    async def receive() -> None:
        async for received in server:
            arrived.put_nowait(received)

    receiving = asyncio.create_task(receive())
    try:
        yield server, arrived
    finally:
        receiving.cancel()
        await asyncio.wait([receiving])
        await server.close()


@asynccontextmanager
async def dialling(
    context: zmq.asyncio.Context, server: Server[Any], name: str, options: SocketOptions = SocketOptions()
) -> AsyncIterator[Connection[Any]]:
    """A peer; closed at the end."""
    peer: Connection[Any] = Connection(context, GatewayToWorkerData, server.endpoint, name.encode(), options)
    try:
        yield peer
    finally:
        peer.close()


async def until_gone(server: Server[Any], peer: bytes) -> None:
    """Send until the server says that the peer is gone."""
    while True:
        try:
            server.send(peer, m.NewSession(1, 1))
        except PeerGone:
            return
        await asyncio.sleep(0.005)


def test_messages_and_payloads_both_ways(context: zmq.asyncio.Context, endpoint: str, run: Run) -> None:
    """A message arrives with its sender's name, and an answer with its payload."""

    async def body() -> None:
        async with serving(context, endpoint) as (server, arrived), dialling(context, server, "w0") as peer:
            await peer.send(m.Join(5))
            assert (await arrived.get())[:2] == (b"w0", m.Join(5))
            server.send(b"w0", step(3), PAYLOAD)
            message, payload = await anext(aiter(peer))
            assert message == step(3)
            assert bytes(payload) == PAYLOAD

    run(body())


def test_a_stranger_cannot_be_sent_to(context: zmq.asyncio.Context, endpoint: str, run: Run) -> None:
    """A name that nobody has dialled with is gone from the start."""

    async def body() -> None:
        async with serving(context, endpoint) as (server, _):
            with pytest.raises(PeerGone):
                server.send(b"nobody", m.NewSession(1, 1))

    run(body())


def test_a_peer_that_left_is_gone(context: zmq.asyncio.Context, endpoint: str, run: Run) -> None:
    """Sending to a peer that closed its end raises `PeerGone` soon, and again whenever it is tried."""

    async def body() -> None:
        async with serving(context, endpoint) as (server, arrived):
            async with dialling(context, server, "w0") as peer:
                await peer.send(m.Join(5))
                await arrived.get()
            await until_gone(server, b"w0")
            with pytest.raises(PeerGone):
                server.send(b"w0", m.NewSession(1, 1))

    run(body())


def test_a_peer_that_reads_nothing_hinders_nobody(context: zmq.asyncio.Context, endpoint: str, run: Run) -> None:
    """What is sent to a peer that doesn't read neither blocks nor grows without bound, and another is served."""

    async def body() -> None:
        async with (
            serving(context, endpoint, NARROW) as (server, arrived),
            dialling(context, server, "idle", NARROW) as idle,
            dialling(context, server, "busy", NARROW) as busy,
        ):
            for peer in (idle, busy):
                await peer.send(m.Join(5))
                await arrived.get()
            incoming = aiter(busy)
            for number in range(2 * CAPACITY):
                started = time.perf_counter()
                try:
                    server.send(b"idle", step(number), PAYLOAD)
                except PeerGone:
                    break
                assert time.perf_counter() - started < 1.0
                if number % 100 == 0:
                    server.send(b"busy", step(number), PAYLOAD)
                    assert (await anext(incoming))[0] == step(number)
            assert CAPACITY <= number < 2 * CAPACITY - 1
            server.send(b"busy", step(7), PAYLOAD)
            assert (await anext(incoming))[0] == step(7)

    run(body())


@pytest.mark.slow
def test_a_peer_that_reads_again_finds_what_waited_and_what_must_arrive(
    context: zmq.asyncio.Context, endpoint: str, run: Run
) -> None:
    """Only what was refused is missing."""

    async def body() -> None:
        async with (
            serving(context, endpoint, NARROW) as (server, arrived),
            dialling(context, server, "slow", NARROW) as slow,
        ):
            await slow.send(m.Join(5))
            await arrived.get()
            for number in range(2 * CAPACITY):
                try:
                    server.send(b"slow", step(number), PAYLOAD)
                except PeerGone:
                    break
            server.send(b"slow", step(number + 1), PAYLOAD, always=True)
            incoming = aiter(slow)
            expected = [*range(number), number + 1]
            assert [(await anext(incoming))[0].step for _ in expected] == expected

    run(body())


def test_a_peer_that_reads_late_misses_nothing(context: zmq.asyncio.Context, endpoint: str, run: Run) -> None:
    """With queues of one and frames as large as the buffers, everything arrives in order once it is read."""

    async def body() -> None:
        async with (
            serving(context, endpoint, NARROW) as (server, arrived),
            dialling(context, server, "late", NARROW) as late,
        ):
            await late.send(m.Join(5))
            await arrived.get()
            for number in range(100):
                server.send(b"late", step(number), PAYLOAD)
            incoming = aiter(late)
            assert [(await anext(incoming))[0].step for _ in range(100)] == list(range(100))

    run(body())


def test_a_restarted_peer_takes_its_name_over(context: zmq.asyncio.Context, endpoint: str, run: Run) -> None:
    """A process that is started again at once has its name, whether its former end was noticed or not."""

    async def body() -> None:
        async with serving(context, endpoint) as (server, arrived):
            for session in (1, 2, 3):
                async with dialling(context, server, "w0") as peer:
                    await peer.send(m.Join(session))
                    assert (await arrived.get())[1] == m.Join(session)
                    server.send(b"w0", m.NewSession(1, session))
                    assert (await anext(aiter(peer)))[0] == m.NewSession(1, session)

    run(body())


def test_malformed_messages_are_counted_and_survived(
    context: zmq.asyncio.Context, endpoint: str, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    """Noise, messages of another direction and frames without end are refused, one by one; the next is served."""
    spoilt = [
        [b""],
        [b"noise"],
        [bytes(frame) for frame in encode(m.Goodbye("not on this channel"))],
        [*[bytes(frame) for frame in encode(m.Join(1))], b"surplus"],
        [b"\x80"] * 7,
    ]

    async def body() -> None:
        async with serving(context, endpoint) as (server, arrived):
            with connect(context, zmq.DEALER, server.endpoint, identity=b"rude") as rude:
                for frames in spoilt:
                    await rude.send_multipart(frames)
                await rude.send_multipart(encode(m.Join(6)))
                assert (await arrived.get())[:2] == (b"rude", m.Join(6))
            assert server.refused_frames == len(spoilt)

    run(body())
    assert caplog.text.count("is refused") == len(spoilt)


def test_an_oversized_frame_ends_only_its_own_connection(context: zmq.asyncio.Context, endpoint: str, run: Run) -> None:
    """A frame above the limit never arrives; other peers notice nothing, and the sender can come back."""

    async def body() -> None:
        small = SocketOptions(max_bytes=1000)
        async with serving(context, endpoint, small) as (server, arrived), dialling(context, server, "w0") as other:
            with connect(context, zmq.DEALER, server.endpoint, identity=b"big") as big:
                await big.send(b"x" * 2000)
                await other.send(m.Join(1))
                assert (await arrived.get())[:2] == (b"w0", m.Join(1))
                await until_gone(server, b"big")
            with connect(context, zmq.DEALER, server.endpoint, identity=b"big") as big:
                await big.send_multipart(encode(m.Join(2)))
                assert (await arrived.get())[:2] == (b"big", m.Join(2))
            assert server.refused_frames == 0

    run(body())


def test_a_connection_refuses_another_protocol(context: zmq.asyncio.Context, endpoint: str, run: Run) -> None:
    """The dialling end raises `WireError` for a message that is not of its union."""

    async def body() -> None:
        async with serving(context, endpoint) as (server, arrived):
            peer: Connection[Any] = Connection(context, WorkerToGateway, server.endpoint, b"w0")
            await peer.send(m.Join(1))
            await arrived.get()
            server.send(b"w0", m.NewSession(1, 1))
            with pytest.raises(WireError, match="NewSession"):
                await anext(aiter(peer))
            peer.close()

    run(body())


def test_the_watch_finds_a_task(run: Run) -> None:
    """A test that leaves a task behind is found out."""

    async def body() -> None:
        asyncio.create_task(asyncio.sleep(60))  # noqa: RUF006

    with pytest.raises(AssertionError, match="left tasks running"):
        run(body())


@pytest.mark.slow
def test_the_watch_finds_a_socket() -> None:
    """A test that leaves a socket open is found out."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket, endpoint = bind(context, zmq.ROUTER, "tcp://127.0.0.1:0")
    assert not terminates(context)
    close_bound(socket, endpoint)  # lets the context end


def test_a_flood_on_one_socket_leaves_other_tasks_their_turn(
    context: zmq.asyncio.Context, endpoint: str, run: Run
) -> None:
    """However many messages wait to be received."""

    async def body() -> None:
        server: Server[m.Join] = Server(context, WorkerToGatewayData, endpoint, SocketOptions(queue=1024))
        received = 0

        async def receive() -> None:
            nonlocal received
            async for _ in server:
                received += 1

        async with dialling(context, server, "flood", SocketOptions(queue=1024)) as flood:
            for _ in range(20 * BATCH):
                await flood.send(m.Join(5))
            await asyncio.sleep(0.2)  # all wait in the server's queue
            receiving = asyncio.create_task(receive())
            seen = 0
            while received < 20 * BATCH:
                await asyncio.sleep(0)
                assert received - seen <= BATCH
                seen = received
            receiving.cancel()
            await asyncio.wait([receiving])
        await server.close()

    run(body())
