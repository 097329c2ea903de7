"""The data loop serves compute workers over plain TCP, by the same rules as over other sockets."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import zmq

from pannier.attention.core import AttentionCore
from pannier.attention.worker import AttentionWorker
from pannier.net import NetError, SocketOptions
from pannier.net.keys import make_keys, worker_keys
from pannier.net.tcp.frame import write_head
from pannier.wire import encode
from pannier.wire import messages as m

from .loop_rig import LARGEST, Rig, check_lanes, check_no_room, serving
from .rig import LIFE, Hand, Stored, assert_answers, chunk, decode, kinds

pytestmark = [pytest.mark.timeout(60)]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with serving(tmp_path) as rig:
        yield rig


def test_steps_over_plain_tcp(rig: Rig) -> None:
    """Answers are the same as without, in several lanes of several compute workers at once."""
    with rig.tcp("c0") as first, rig.tcp("c1") as second:
        check_lanes(first, second)


def test_a_step_over_several_connections_of_one_compute_worker(rig: Rig) -> None:
    """Whatever arrives first: what came early is answered on the connection that brought the step's beginning."""
    hand, sequence = Hand(), Stored([3, 1, 2])
    with rig.tcp("c0") as first, rig.tcp("c0", flow=1) as second:
        first.ask(hand.only(0, [chunk(sequence, 7)]).frames)
        made = hand.only(1, [decode(sequence)])
        second.send(made.pieces[1:])
        time.sleep(0.1)
        first.send([made.begin, made.pieces[0], made.end])
        replies = [first.receive() for _ in range(len(made.pieces) + 1)]
        assert kinds(replies) == ["Answer"] * len(made.pieces) + ["StepWritten"]
        assert_answers([replies], made.answers)


def test_what_comes_early_is_kept_when_its_memory_is_used_again(rig: Rig) -> None:
    """The next step's rows wait for the end of the one before, while more arrives."""
    hand, sequence = Hand(), Stored([3, 1, 2])
    made = [hand.only(0, [chunk(sequence, 7)]), hand.only(1, [decode(sequence)])]
    with rig.tcp("c0") as peer:
        peer.send(made[0].frames[:-1])
        peer.send(made[1].frames)
        assert set(kinds([peer.receive() for _ in made[0].pieces])) == {"PieceWritten"}
        for _ in range(50):
            tables = torch.full((20_000,), -1, dtype=torch.int32)
            peer.send([(m.BeginStep(LIFE + 1, 1, 1, 0, (), (), ()), [tables])])
            while not peer.stream.flush():
                time.sleep(0.001)
        rig.wait_for("stale_frames", 50)
        peer.send(made[0].frames[-1:])
        replies = [peer.receive() for _ in range(1 + len(made[1].pieces) + 1)]
        assert_answers([replies], made[1].answers)


def test_nothing_of_a_fenced_session_is_written(rig: Rig) -> None:
    """Late frames are dropped; the session that follows goes on, over the same connection or a new one."""
    hand, sequence = Hand(), Stored([3, 1, 2])
    with rig.tcp("c0") as peer:
        peer.ask(hand.only(0, [chunk(sequence, 7)]).frames)
        assert rig.tell(m.Fence(LIFE, "c0", 1)) == encode(m.Fenced(LIFE, "c0", 1))[0]
        late = hand.only(1, [chunk(sequence, 2)])
        peer.send(late.frames)
        again = Hand(session=2).only(0, [chunk(Stored([7]), 3)])
        assert isinstance(peer.ask(again.frames)[-1][0], m.StepWritten)
        assert rig.worker.counters()["stale_frames"] == len(late.frames)
        with rig.tcp("c0") as successor:
            again = Hand(session=3).only(0, [chunk(Stored([8]), 3)])
            assert isinstance(successor.ask(again.frames)[-1][0], m.StepWritten)
            peer.wait_until_lost()


def test_a_compute_worker_that_reads_nothing_hinders_no_other(rig: Rig) -> None:
    """Until so much waits for it that it counts as gone."""
    with rig.tcp("c0") as deaf, rig.tcp("c1") as other:
        deaf.send([(m.AbortStep(LIFE, 1, number, 0), []) for number in range(60_000)])
        hand, sequence = Hand(seed=1), Stored([5, 6])
        assert isinstance(other.ask(hand.only(0, [chunk(sequence, 4)]).frames)[-1][0], m.StepWritten)
        made = hand.only(1, [decode(sequence)])
        assert_answers([other.ask(made.frames)], made.answers)


def test_an_answer_that_is_larger_than_agreed_is_a_failed_step(rig: Rig) -> None:
    """It says how large it was, and the loop goes on."""
    with rig.tcp("c0", (1 << 20, 4096)) as narrow, rig.tcp("c1") as other:
        check_no_room(narrow, other, "larger than this connection takes, which is 4096")


def test_rude_peers(rig: Rig) -> None:
    """Messages that are none are counted; bytes that are no frame end their own connection; others notice nothing."""
    with rig.tcp("c0") as peer, rig.tcp("c1") as mad:
        for noise in (b"", b"x", b"noise", encode(m.Join(LIFE))[0], b"\xc1" * 100):
            peer.stream.send([write_head(bytes(noise), 0, LARGEST[0])])
        rig.wait_for("refused_frames", 5)
        mad.stream.send([b"GET / HTTP/1.1\r\n\r\n"])
        mad.wait_until_lost()
        step = Hand(lane=1).only(0, [chunk(Stored([5]), 3)])
        assert isinstance(peer.ask(step.frames)[-1][0], m.StepWritten)


def test_a_compute_worker_that_leaves_in_the_middle_of_a_step(rig: Rig) -> None:
    step = Hand(seed=3).only(0, [chunk(Stored([5, 6]), 4)])
    with rig.tcp("c1") as leaving:
        leaving.send(step.frames)
    hand, sequence = Hand(), Stored([3, 1, 2])
    with rig.tcp("c0") as peer:
        peer.ask(hand.only(0, [chunk(sequence, 7)]).frames)
        made = hand.only(1, [decode(sequence)])
        assert_answers([peer.ask(made.frames)], made.answers)


def test_where_links_are_encrypted_there_is_no_plain_tcp(tmp_path: Path) -> None:
    """And a port that is taken is named, with nothing left open."""
    make_keys(tmp_path)
    _, links = worker_keys(tmp_path)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    core = AttentionCore(torch.device("cpu"))
    at = f"ipc://{tmp_path}/a0"
    worker = AttentionWorker(context, "a0", core, at, SocketOptions(), link_options=SocketOptions(curve=links))
    assert worker.tcp == ""
    worker.close()
    worker = AttentionWorker(context, "a0", core, "tcp://127.0.0.1:0", SocketOptions())
    assert worker.tcp.startswith("tcp://127.0.0.1:")
    taken = worker.tcp.rpartition("/")[0]
    with pytest.raises(NetError, match="is in use by another process"):
        AttentionWorker(context, "a1", core, at, SocketOptions(), listen_tcp=taken)
    worker.close()
    context.term()
