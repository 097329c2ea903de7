"""A slower network holds what is under way, and nobody's thread or memory with it."""

import select
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pannier.attention.emulated_network import EmulatedNetwork
from pannier.attention.pace import Pace, PacedDevice
from pannier.net.shm import CannotShare, Layout, functions
from pannier.runtime.config import AttentionConfig, load
from pannier.wire import encode
from pannier.wire import messages as m

from .loop_rig import serving
from .rig import LIFE, Hand, Stored, assert_answers, chunk, decode

pytestmark = [pytest.mark.timeout(60)]


def shared_memory_is_missing() -> str:
    """Why, as on a machine without a compiler; "" if it isn't."""
    try:
        functions()
    except CannotShare as error:
        return str(error)
    return ""


needs_shared_memory = pytest.mark.skipif(bool(shared_memory_is_missing()), reason=shared_memory_is_missing())
FOR_EVER_MS = 3_600_000.0


@pytest.fixture
def log() -> list[tuple[str, float]]:
    """Names of what has come, and when."""
    return []


def sized(num_bytes: int) -> list[torch.Tensor]:
    return [torch.zeros(num_bytes, dtype=torch.uint8)]


def wait_for(network: EmulatedNetwork, log: list[tuple[str, float]], count: int) -> None:
    """As a data thread does, which sleeps until something is due."""
    while len(log) < count:
        network.deliver()
        if len(log) < count:
            assert select.select([network], [], [], 10) == ([network], [], [])


@pytest.fixture
def slow() -> Iterator[EmulatedNetwork]:
    """125 bytes a millisecond, and 20 ms more each way."""
    network = EmulatedNetwork(delay_ms=20.0, gigabits=1e-3)
    yield network
    network.close()


def test_a_message_takes_its_delay_and_its_bytes_at_the_rate_behind_the_one_before_it(
    slow: EmulatedNetwork, log: list[tuple[str, float]]
) -> None:
    """The delay is no queue: several messages are in it at once."""
    started = time.perf_counter()
    for name, size in (("first", 1250), ("second", 2500), ("third", 0)):
        slow.send("wire", sized(size), lambda name=name: log.append((name, time.perf_counter() - started)))  # type: ignore[misc]
    wait_for(slow, log, 3)
    assert [name for name, _ in log] == ["first", "second", "third"]
    assert all(took >= least for (_, took), least in zip(log, (0.030, 0.050, 0.050), strict=True))


def test_wires_do_not_wait_for_each_other(slow: EmulatedNetwork, log: list[tuple[str, float]]) -> None:
    """What is due first comes first, whatever was sent first; and nothing leaves before it is ready."""
    now = time.perf_counter()
    slow.send("crowded", sized(12_500), lambda: log.append(("last", 0)))
    slow.send("empty", sized(125), lambda: log.append(("first", 0)))
    slow.send("late", [], lambda: log.append(("middle", 0)), ready_at=now + 0.05)
    wait_for(slow, log, 3)
    assert [name for name, _ in log] == ["first", "middle", "last"]
    assert time.perf_counter() - now >= 0.12


def test_what_is_configured() -> None:
    assert EmulatedNetwork.of(load(AttentionConfig, environ={})) is None
    given = {"emulate_delay": "0.4", "emulate_bandwidth": "1"}
    network = EmulatedNetwork.of(load(AttentionConfig, flags=given, environ={}))
    assert str(network) == "0.4 ms each way, 1 Gbit/s"


@needs_shared_memory
def test_a_worker_behind_it_answers_the_same_and_later(tmp_path: Path) -> None:
    """Steps are exact; the first question there and the last acknowledgement back have taken their delays."""
    hand, sequence = Hand(), Stored([3, 1, 2])
    with serving(tmp_path, EmulatedNetwork(delay_ms=30.0)) as rig, rig.shm("c0") as peer:
        peer.ask(hand.only(0, [chunk(sequence, 7)]).frames)
        made, started = hand.only(1, [decode(sequence)]), time.perf_counter()
        assert_answers([peer.ask(made.frames)], made.answers)
        assert time.perf_counter() - started >= 0.06


@needs_shared_memory
def test_what_is_under_way_takes_no_room_in_a_ring(tmp_path: Path) -> None:
    """Far more than fits is taken in long before any of it is served."""
    with serving(tmp_path, EmulatedNetwork(FOR_EVER_MS)) as rig, rig.shm("c0", Layout(2, (8192, 8192))) as peer:
        for number in range(50):  # of 1,200 bytes and more
            tables = torch.full((300,), -1, dtype=torch.int32)
            peer.send([(m.BeginStep(LIFE, 1, number, 0, (), (), ()), [tables])])
            while not peer.messages.flush():
                time.sleep(0.001)


@needs_shared_memory
def test_a_worker_whose_device_is_busy_obeys_its_gateway(tmp_path: Path) -> None:
    """Its answers wait for the device, its thread for nobody."""
    hand, sequence = Hand(), Stored([3, 1, 2])
    device = PacedDevice(Pace(step_ms=FOR_EVER_MS))
    with serving(tmp_path, device=device) as rig, rig.shm("c0") as peer:
        peer.ask(hand.only(0, [chunk(sequence, 7)]).frames)
        peer.send(hand.only(1, [decode(sequence)]).frames)
        rig.wait_for("steps", 2)
        assert device.busy_until > time.perf_counter() + 60
        assert rig.tell(m.Fence(LIFE, "c0", 1)) == encode(m.Fenced(LIFE, "c0", 1))[0]
        assert peer.messages.receive() is None


@needs_shared_memory
def test_answers_to_who_has_hung_up_are_dropped(tmp_path: Path) -> None:
    """They come too late for it, and hinder no other."""
    with serving(tmp_path, EmulatedNetwork(delay_ms=300.0)) as rig:
        with rig.shm("c1") as leaving:
            step = Hand(seed=3).only(0, [chunk(Stored([5, 6]), 4)])
            leaving.send(step.frames)
            rig.wait_for("steps", 1)
        rig.wait_for("answers_to_lost_peers", 1)
        hand, sequence = Hand(), Stored([3, 1, 2])
        with rig.shm("c0") as peer:
            peer.ask(hand.only(0, [chunk(sequence, 7)]).frames)
            made = hand.only(1, [decode(sequence)])
            assert_answers([peer.ask(made.frames)], made.answers)
