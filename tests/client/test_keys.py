"""A client and keys: encrypted if they fit, and one clear error, soon, if they don't."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pannier.client import AsyncClient, Client, Unreachable
from pannier.net import BadKeys, Curve, SocketOptions
from pannier.net.keys import gateway_keys, make_keys

from .conftest import FakeGateway

pytestmark = pytest.mark.timeout(60)
PATIENCE_S = 20.0
"""Much more than a refusal takes."""


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys")
    return tmp_path / "keys"


@pytest.fixture
def strange(tmp_path: Path, keys: Path) -> Path:
    """A client's folder that names the right gateway, which doesn't know the client."""
    make_keys(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "gateway.public").write_bytes((keys / "gateway.public").read_bytes())
    return tmp_path / "elsewhere"


@pytest.fixture
def let_in(keys: Path) -> set[bytes]:
    """The clients' keys that the gateway knows; a test may add some."""
    return set(gateway_keys(keys).clients.peers)


@pytest.fixture
def locked(endpoint: str, keys: Path, let_in: set[bytes]) -> Iterator[FakeGateway]:
    curve = Curve(gateway_keys(keys).clients.secret, let_in)
    with FakeGateway(endpoint, options=SocketOptions(curve=curve)) as made:
        yield made


def test_keys_that_fit(locked: FakeGateway, keys: Path) -> None:
    """For both clients; a path may be a string."""
    with Client(locked.endpoint, keys=str(keys)) as client:
        assert client.complete("two words").text == "two words"

    async def body() -> None:
        async with AsyncClient(locked.endpoint, keys=keys) as client:
            assert (await client.complete("two words")).text == "two words"

    asyncio.run(body())


def test_an_unknown_key_is_one_error_at_once(locked: FakeGateway, strange: Path) -> None:
    """Not a wait until the timeout."""
    started = time.monotonic()
    with Client(locked.endpoint, keys=strange, connect_timeout_s=PATIENCE_S) as client:
        for _ in range(2):
            with pytest.raises(Unreachable, match=f"^{locked.endpoint} can't be reached: it doesn't know this key"):
                client.complete("hello")
    assert time.monotonic() - started < PATIENCE_S


def test_a_client_without_keys_is_told_within_its_timeout(locked: FakeGateway) -> None:
    """That keys are wanted; or at least that connections break off, if the gateway hung up before it said so."""
    with (
        Client(locked.endpoint, connect_timeout_s=2.0) as client,
        pytest.raises(Unreachable, match=r"asks for keys|breaks every connection off"),
    ):
        client.complete("hello")


def test_a_gateway_with_another_key_is_told_within_the_timeout(locked: FakeGateway, keys: Path, tmp_path: Path) -> None:
    """Such a gateway learns nothing."""
    make_keys(tmp_path / "other")
    (keys / "gateway.public").write_bytes((tmp_path / "other" / "gateway.public").read_bytes())
    with (
        Client(locked.endpoint, keys=keys, connect_timeout_s=1.0) as client,
        pytest.raises(Unreachable, match="breaks every connection off; its keys and this client's may not fit"),
    ):
        client.complete("hello")
    assert locked.received.empty()


def test_a_gateway_without_keys_is_not_talked_to(gateway: FakeGateway, keys: Path) -> None:
    """Who gave keys expects encryption."""
    with (
        Client(gateway.endpoint, keys=keys, connect_timeout_s=2.0) as client,
        pytest.raises(Unreachable, match=r"does not encrypt, and keys were given|breaks every connection off"),
    ):
        client.complete("hello")
    assert gateway.received.empty()


def test_a_client_that_is_let_in_later_gets_through(locked: FakeGateway, strange: Path, let_in: set[bytes]) -> None:
    """The same client object: it dials again for its next request."""
    with Client(locked.endpoint, keys=strange, connect_timeout_s=PATIENCE_S) as client:
        with pytest.raises(Unreachable, match="doesn't know this key"):
            client.complete("hello")
        let_in.add((strange / "clients" / "client.public").read_bytes().strip())
        assert client.complete("hello").text == "hello"


def test_keys_that_cannot_be_read(endpoint: str, tmp_path: Path) -> None:
    """Say so before anything is dialled."""
    with pytest.raises(BadKeys, match=r"client\.secret is missing"):
        Client(endpoint, keys=tmp_path)
