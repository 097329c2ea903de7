"""Addresses: what may be bound, what is refused, and what becomes of socket files."""

import socket as plain
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from pannier.net import Exposed, NetError, PortBusy, SocketOptions, bind, close_bound, connect

pytestmark = pytest.mark.timeout(20)
INSECURE = SocketOptions(insecure=True)
ELSEWHERE = (
    "tcp://0.0.0.0:0",
    "tcp://*:0",
    "tcp://[::]:5000",
    "tcp://8.8.8.8:5000",
    "tcp://192.168.1.4:5000",
    "tcp://eth0:5000",
    "tcp://gateway.example:5000",
    "tcp://127.0.0.1.example:5000",
    "tcp://10.0.0.1;127.0.0.1:5000",
)


@pytest.mark.parametrize("endpoint", ELSEWHERE)
def test_exposure_is_refused(context: zmq.asyncio.Context, endpoint: str) -> None:
    """Neither end uses an address that other hosts can reach, or a name that may be one; nothing is opened."""
    with pytest.raises(Exposed, match="insecure"):
        bind(context, zmq.ROUTER, endpoint)
    with pytest.raises(Exposed, match="insecure"):
        connect(context, zmq.DEALER, endpoint)


def test_exposure_is_possible_on_demand(context: zmq.asyncio.Context) -> None:
    """Whoever says insecure may listen everywhere."""
    socket, endpoint = bind(context, zmq.ROUTER, "tcp://0.0.0.0:0", INSECURE)
    close_bound(socket, endpoint)
    assert endpoint.startswith("tcp://0.0.0.0:")


@pytest.mark.parametrize("endpoint", ["", "127.0.0.1:5000", "http://127.0.0.1:5000", "udp://127.0.0.1:5000", "tcp://"])
def test_what_is_no_endpoint_is_refused(context: zmq.asyncio.Context, endpoint: str) -> None:
    """The refusal shows how an endpoint is written."""
    for use, kind in ((bind, zmq.ROUTER), (connect, zmq.DEALER)):
        with pytest.raises(NetError, match="write tcp://HOST:PORT or ipc://PATH"):
            use(context, kind, endpoint)


def test_the_real_port_is_published(context: zmq.asyncio.Context) -> None:
    """Port 0 becomes the port that the system gave, and it can be dialled."""
    socket, endpoint = bind(context, zmq.ROUTER, "tcp://127.0.0.1:0")
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    with plain.create_connection((host, int(port)), timeout=5):
        assert int(port) > 0
    close_bound(socket, endpoint)


def test_a_busy_port_is_named(context: zmq.asyncio.Context) -> None:
    """Whoever comes second is told which address is taken, and takes nothing from the first."""
    with plain.create_server(("127.0.0.1", 0)) as listening:
        endpoint = f"tcp://127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(PortBusy, match=endpoint):
            bind(context, zmq.ROUTER, endpoint)


def test_a_live_socket_file_is_left_alone(context: zmq.asyncio.Context, tmp_path: Path) -> None:
    """A second listener on one path is refused, and the first goes on listening."""
    socket, endpoint = bind(context, zmq.ROUTER, f"ipc://{tmp_path}/live")
    with pytest.raises(PortBusy, match="live"):
        bind(context, zmq.ROUTER, endpoint)
    with plain.socket(plain.AF_UNIX) as dialling:
        dialling.connect(str(tmp_path / "live"))
    close_bound(socket, endpoint)
    assert not (tmp_path / "live").exists()


def test_a_stale_socket_file_is_replaced(context: zmq.asyncio.Context, tmp_path: Path) -> None:
    """What a killed process left behind keeps nobody from starting again."""
    with plain.socket(plain.AF_UNIX) as killed:
        killed.bind(str(tmp_path / "stale"))
    socket, endpoint = bind(context, zmq.ROUTER, f"ipc://{tmp_path}/stale")
    close_bound(socket, endpoint)


def test_a_file_that_is_no_socket_is_kept(context: zmq.asyncio.Context, tmp_path: Path) -> None:
    """A path given by mistake costs nobody a file or a folder."""
    (tmp_path / "letter").write_text("dear")
    (tmp_path / "folder").mkdir()
    for name in ("letter", "folder"):
        with pytest.raises(NetError, match=f"{name} is there already and is no socket"):
            bind(context, zmq.ROUTER, f"ipc://{tmp_path}/{name}")
    assert (tmp_path / "letter").read_text() == "dear"


def test_an_address_that_cannot_be_had(context: zmq.asyncio.Context, tmp_path: Path) -> None:
    """A path without its folder, or longer than the system allows, is a `NetError` that names it."""
    for path in (tmp_path / "missing" / "s", tmp_path / ("x" * 120)):
        with pytest.raises(NetError, match="can't listen on ipc"):
            bind(context, zmq.ROUTER, f"ipc://{path}")


def test_silence_that_is_borne_is_a_setting(context: zmq.asyncio.Context) -> None:
    """A connection that is dialled anew has lost what was under way; who has patience says so at both ends."""
    patient = SocketOptions(silence_s=61.5)
    bound, endpoint = bind(context, zmq.ROUTER, "tcp://127.0.0.1:0", patient)
    dialled = connect(context, zmq.DEALER, endpoint, patient)
    assert [socket.getsockopt(zmq.HEARTBEAT_TIMEOUT) for socket in (bound, dialled)] == [61_500, 61_500]
    dialled.close()
    close_bound(bound, endpoint)
