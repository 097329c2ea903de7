"""The data loop serves compute workers of its host through shared memory, by the same rules as over sockets."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pannier.net.shm import CannotShare, Layout, functions
from pannier.wire import encode
from pannier.wire import messages as m

from .loop_rig import Rig, check_lanes, check_no_room, serving
from .rig import LIFE, Hand, Stored, assert_answers, chunk, decode, kinds

pytestmark = [pytest.mark.timeout(60)]
try:
    functions()
except CannotShare as missing:  # as on a machine without a compiler
    pytestmark.append(pytest.mark.skip(reason=str(missing)))


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with serving(tmp_path) as rig:
        yield rig


def test_steps_through_shared_memory(rig: Rig) -> None:
    """Answers are the same as without, in several lanes of several compute workers at once."""
    with rig.shm("c0") as first, rig.shm("c1") as second:
        check_lanes(first, second)


def test_what_comes_early_is_kept_when_its_memory_is_used_again(rig: Rig) -> None:
    """The next step's rows wait for the end of the one before, while the ring goes on."""
    hand, sequence = Hand(), Stored([3, 1, 2])
    made = [hand.only(0, [chunk(sequence, 7)]), hand.only(1, [decode(sequence)])]
    with rig.shm("c0", Layout(2, (8192, 8192))) as peer:
        peer.send(made[0].frames[:-1])
        peer.send(made[1].frames)
        pieces = [peer.receive() for _ in made[0].pieces]
        assert set(kinds(pieces)) == {"PieceWritten"}
        for _ in range(50):  # over all of the ring
            peer.send([(m.BeginStep(LIFE + 1, 1, 1, 0, (), (), ()), [torch.full((300,), -1, dtype=torch.int32)])])
            while not peer.messages.flush():
                time.sleep(0.001)
        rig.wait_for("stale_frames", 50)
        peer.send(made[0].frames[-1:])
        replies = [peer.receive() for _ in range(1 + len(made[1].pieces) + 1)]
        assert_answers([replies], made[1].answers)


def test_nothing_of_a_fenced_session_is_written(rig: Rig) -> None:
    """Late frames are dropped; the session that follows goes on over the same link."""
    hand, sequence = Hand(), Stored([3, 1, 2])
    with rig.shm("c0") as peer:
        peer.ask(hand.only(0, [chunk(sequence, 7)]).frames)
        assert rig.tell(m.Fence(LIFE, "c0", 1)) == encode(m.Fenced(LIFE, "c0", 1))[0]
        late = hand.only(1, [chunk(sequence, 2)])
        peer.send(late.frames)
        again = Hand(session=2).only(0, [chunk(Stored([7]), 3)])
        assert isinstance(peer.ask(again.frames)[-1][0], m.StepWritten)
    assert rig.worker.counters()["stale_frames"] == len(late.frames)


def test_rings_full_of_a_former_session_hinder_no_new_one(rig: Rig) -> None:
    """A compute worker that reads no more: whoever has its name next has rings of its own, others notice nothing."""
    with rig.shm("c0", Layout(1, (1 << 16, 4096))) as stopped, rig.shm("c1") as other:
        hand, sequence = Hand(session=1), Stored([3, 1, 2])
        stopped.ask(hand.only(0, [chunk(sequence, 7)]).frames)
        for number in range(1, 200):
            stopped.send([(m.AbortStep(LIFE, 1, number, 0), [])])
            while not stopped.messages.flush():
                time.sleep(0.001)
        hand, sequence = Hand(seed=1), Stored([5, 6])
        assert isinstance(other.ask(hand.only(0, [chunk(sequence, 4)]).frames)[-1][0], m.StepWritten)
        rig.tell(m.Fence(LIFE, "c0", 1))
        with rig.shm("c0") as successor:
            hand, sequence = Hand(session=2), Stored([7, 8])
            assert isinstance(successor.ask(hand.only(0, [chunk(sequence, 4)]).frames)[-1][0], m.StepWritten)
            made = hand.only(1, [decode(sequence)])
            assert_answers([successor.ask(made.frames)], made.answers)


def test_an_answer_for_which_there_is_no_room_is_a_failed_step(rig: Rig) -> None:
    """It says how large it was, and the loop goes on."""
    with rig.shm("c0", Layout(1, (1 << 16, 4096))) as narrow, rig.shm("c1") as other:
        check_no_room(narrow, other, "larger than shared memory takes")


def test_noise_in_a_ring_is_counted_and_survived(rig: Rig) -> None:
    with rig.shm("c0") as peer:
        for noise in (b"x", b"noise", encode(m.Join(LIFE))[0], b"\xc1" * 100):
            assert peer.channel.writers[1].reserve(bytes(noise), 0) is not None
            peer.channel.publish(1)
        rig.wait_for("refused_frames", 4)
        step = Hand(lane=1).only(0, [chunk(Stored([5]), 3)])
        assert isinstance(peer.ask(step.frames)[-1][0], m.StepWritten)
