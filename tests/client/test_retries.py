"""A client that may ask again does so where that is safe, and only there."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any, Protocol

import pytest

from pannier.client import AsyncClient, Client, ClientError, NotServed, RequestFailed, TimedOut, Unreachable
from pannier.client.retry import FIRST_S, MOST_S, is_passing, pauses
from pannier.wire.messages import Delta, Failed, Generate, Message, Usage

pytestmark = pytest.mark.timeout(30)
MakeGateway = Callable[[str], Any]


class Gateway(Protocol):
    """The fake of conftest.py."""

    endpoint: str
    received: Any

    def next_request(self) -> Generate: ...
    def next_cancel(self) -> str: ...
    def send(self, *messages: Message) -> None: ...


def last(request: str, text: str) -> Delta:
    return Delta(request, 0, text, (2,), (), (), "stop", Usage(1, 0, 1))


def refused(request: str, code: str = "overloaded") -> Failed:
    return Failed(request, code, None, "not now")


@pytest.mark.parametrize("code", ["overloaded", "unavailable"])
def test_a_request_that_found_no_room_is_asked_again(quiet: Gateway, code: str) -> None:
    """Under a new name, for the gateway may still know the old one."""
    with Client(quiet.endpoint, retries=2) as client, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.complete, "x", seed=7)
        asked = [quiet.next_request()]
        for _ in range(2):
            quiet.send(refused(asked[-1].request, code))
            asked.append(quiet.next_request())
        quiet.send(last(asked[-1].request, "at last"))
        assert answer.result().text == "at last"
    assert len({each.request for each in asked}) == 3
    assert {(each.prompt, each.params.seed) for each in asked} == {("x", 7)}


def test_so_does_the_one_for_asyncio(quiet: Gateway) -> None:
    async def main() -> str:
        async with AsyncClient(quiet.endpoint, retries=1) as client:
            turns = ({"role": "user", "content": text} for text in ("hm",))  # can be read once only
            return (await client.chat(turns)).text

    def answer() -> None:
        quiet.send(refused(quiet.next_request().request))
        second = quiet.next_request()
        assert second.messages is not None
        quiet.send(last(second.request, second.messages[0].content))

    with ThreadPoolExecutor(1) as pool:
        answering = pool.submit(answer)
        assert asyncio.run(main()) == "hm"
        answering.result()


def test_a_gateway_that_comes_later_is_found(make_gateway: MakeGateway, ipc: str) -> None:
    with Client(ipc, connect_timeout_s=0.05, retries=8) as client:
        starting = threading.Timer(0.3, make_gateway, (ipc,))
        starting.start()
        assert client.tokenize("four") == (0, 1, 2, 3)
        starting.join()


@pytest.mark.parametrize("code", ["invalid", "timeout", "internal"])
def test_what_is_wrong_stays_wrong(quiet: Gateway, code: str) -> None:
    """One request, one error."""
    with Client(quiet.endpoint, retries=5) as client, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.complete, "x")
        quiet.send(refused(quiet.next_request().request, code))
        with pytest.raises(RequestFailed, match="not now"):
            answer.result()
    assert quiet.received.empty()


def test_a_stream_is_not_asked_for_again(quiet: Gateway) -> None:
    """Its reader may have used what had come."""
    with Client(quiet.endpoint, retries=5) as client:
        stream = client.stream("x")
        quiet.send(refused(quiet.next_request().request))
        with pytest.raises(RequestFailed, match="not now"):
            list(stream)
    assert quiet.received.empty()


def test_the_time_is_for_all_tries_together(quiet: Gateway) -> None:
    """The last one ends when it is up, and is cancelled."""
    with Client(quiet.endpoint, retries=5) as client, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.complete, "x", timeout_s=FIRST_S + 0.3)
        quiet.send(refused(quiet.next_request().request))
        second = quiet.next_request()
        with pytest.raises(TimedOut):
            answer.result()
        assert quiet.next_cancel() == second.request


def test_nobody_waits_for_a_try_that_would_come_too_late(quiet: Gateway) -> None:
    """The reason is the error, not the time."""
    with Client(quiet.endpoint, retries=5) as client, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.complete, "x", timeout_s=FIRST_S / 4)
        quiet.send(refused(quiet.next_request().request))
        with pytest.raises(RequestFailed, match="not now"):
            answer.result()


def test_unless_told_otherwise_nothing_is_asked_twice(quiet: Gateway) -> None:
    with Client(quiet.endpoint) as client, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.complete, "x")
        quiet.send(refused(quiet.next_request().request))
        with pytest.raises(RequestFailed, match="not now"):
            answer.result()


def test_pauses_grow_and_are_never_all_the_same() -> None:
    for number, pause_s in zip(count(), pauses(12), strict=False):
        most = min(MOST_S, FIRST_S * 2**number)
        assert most / 2 <= pause_s <= most
    assert list(pauses(3)) != list(pauses(3))
    assert list(pauses(0)) == []


def test_which_errors_pass() -> None:
    assert is_passing(Unreachable("ipc://x"))
    assert is_passing(RequestFailed("overloaded", None, "x"))
    assert not any(map(is_passing, (TimedOut("x"), RequestFailed("invalid", None, "x"), ClientError("x"), OSError())))


def test_embeddings_are_refused(quiet: Gateway) -> None:
    """At once, and clearly; nothing is sent."""
    with Client(quiet.endpoint) as client, pytest.raises(NotServed, match="no embeddings"):
        client.embeddings(["a text"], model="ox")

    async def main() -> None:
        async with AsyncClient(quiet.endpoint) as client:
            await client.embeddings(["a text"])

    with pytest.raises(NotServed, match="no embeddings"):
        asyncio.run(main())
    assert quiet.received.empty()
