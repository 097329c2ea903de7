"""A worker's side of the control channel, against a gateway by hand."""

import asyncio
from pathlib import Path

import pytest
import zmq.asyncio

from pannier.net import Server, SocketOptions
from pannier.runtime import registration
from pannier.runtime.registration import Registration
from pannier.wire import WorkerToGateway
from pannier.wire import messages as m

HELLO = m.Hello(m.PROTOCOL, "w", 1, 1, "h", "l", None, None)
WELCOME = m.Welcome(1, "ipc://d", 1.0)


def test_a_gateway_that_ended_before_it_answered_is_followed_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one has never seen the first hello."""
    monkeypatch.setattr(registration, "PATIENCE_S", 0.05)

    async def body() -> None:
        context, endpoint = zmq.asyncio.Context(), f"ipc://{tmp_path}/g"
        worker = Registration(context, endpoint, HELLO, SocketOptions())
        registering = asyncio.create_task(worker.register())
        for answer in (None, WELCOME):
            gateway: Server[m.Hello] = Server(context, WorkerToGateway, endpoint)
            peer, message, _ = await anext(aiter(gateway))
            assert message == HELLO
            if answer is not None:
                gateway.send(peer, answer)
                assert await registering == WELCOME
            await gateway.close()
        worker.close()
        context.term()

    asyncio.run(asyncio.wait_for(body(), 20))


def test_who_leaves_stays_until_the_gateway_knows(tmp_path: Path) -> None:
    """The gateway's goodbye ends the worker; without one it leaves all the same."""

    async def body() -> None:
        context, endpoint = zmq.asyncio.Context(), f"ipc://{tmp_path}/g"
        gateway: Server[m.Goodbye | m.Heartbeat] = Server(context, WorkerToGateway, endpoint)
        worker = Registration(context, endpoint, HELLO, SocketOptions())
        living = asyncio.create_task(worker.keep_alive(WELCOME, dict))
        leaving = asyncio.create_task(worker.leave("asked to stop"))
        async for peer, message, _ in gateway:
            if isinstance(message, m.Goodbye):
                assert not leaving.done()
                gateway.send(peer, m.Goodbye("as you wish"))
                break
        await living
        assert not leaving.done()
        await leaving
        await gateway.close()
        worker.close()
        context.term()

    asyncio.run(asyncio.wait_for(body(), 20))
