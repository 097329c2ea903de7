"""Several flows to one attention worker: pieces take turns, the rest goes on the first, answers come on any."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import zmq

from pannier.compute.flows import Flows
from pannier.compute.link import ZmqLink
from pannier.net import SocketOptions, bind
from pannier.net.flows import flow_names, peer_of_flow
from pannier.net.outbox import CAPACITY
from pannier.net.shm import Waiting
from pannier.wire import ComputeToAttention, Decoder, encode
from pannier.wire import messages as m

pytestmark = pytest.mark.timeout(60)
FRAME = (1, 1, 1, 0)
PIECE = m.Piece(*FRAME, 0, 0, True, 0, ())
NARROW = SocketOptions(queue=1, buffer_bytes=4096)


@pytest.fixture
def attention() -> Iterator[tuple[Any, str, Any]]:
    """The other end by hand, and the context of both."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router, endpoint = bind(context, zmq.ROUTER, "tcp://127.0.0.1:0", NARROW)
    yield router, endpoint, context
    context.destroy(linger=0)


def linked(attention: tuple[Any, str, Any], count: int, waiting: Waiting, options: SocketOptions) -> Flows:
    _, endpoint, context = attention
    address = m.ShardAddress("a", endpoint, ())
    return Flows([ZmqLink(context, waiting, name, address, options) for name in flow_names("c", count)])


def received(router: Any) -> tuple[bytes, ComputeToAttention]:
    assert router.poll(10_000)
    peer, *frames = router.recv_multipart()
    decoder: Decoder[ComputeToAttention] = Decoder(ComputeToAttention)
    return peer, decoder.decode(frames)[0]


def test_pieces_take_turns_and_the_rest_goes_first(attention: tuple[Any, str, Any]) -> None:
    """Every flow bears the compute worker's name; an answer on any of them is received and wakes who waits."""
    router, waiting = attention[0], Waiting()
    link = linked(attention, 3, waiting, SocketOptions())
    assert link.kind == "zmq tcp x3"
    tensors = [torch.zeros(1, 1, 8)] * 3
    link.send(m.BeginStep(*FRAME, (), (), ()), [torch.zeros(0, dtype=torch.int32)])
    for _ in range(6):
        link.send(PIECE, tensors)
    link.send(m.EndStep(*FRAME, 6), [])
    arrived = [received(router) for _ in range(8)]
    by_flow = {flow: [type(message) for peer, message in arrived if peer == flow] for flow in (b"c", b"c#1", b"c#2")}
    assert by_flow == {
        b"c": [m.BeginStep, m.Piece, m.Piece, m.EndStep],
        b"c#1": [m.Piece] * 2,
        b"c#2": [m.Piece] * 2,
    }
    assert {peer_of_flow(peer) for peer, _ in arrived} == {"c"}
    for flow in by_flow:
        router.send_multipart([flow, *encode(m.StepWritten(*FRAME))])
        while (answer := link.receive()) is None:
            assert waiting.wait(10_000)
        assert answer[0] == m.StepWritten(*FRAME)
    assert link.receive() is None
    link.close()
    assert waiting.wait(0) == {}


def test_what_a_full_queue_keeps_is_sent_later(attention: tuple[Any, str, Any]) -> None:
    """Nothing blocks, nothing is lost, and each flow keeps at most what an outbox holds."""
    router, link = attention[0], linked(attention, 2, Waiting(), NARROW)
    big = [torch.zeros(1, 1, 64 << 10)] * 3
    for _ in range(40):
        link.send(PIECE, big)
    assert CAPACITY > 40
    assert not link.flush()
    peers: list[bytes] = []
    while len(peers) < 40:
        peers.append(received(router)[0])
        link.flush()
    assert link.flush()
    assert sorted(peers) == [b"c"] * 20 + [b"c#1"] * 20
    link.close()
