"""Shared memory between real processes: who sleeps is woken, who dies is missed at once, and nothing stays behind."""

import os
import signal
import socket
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from pannier.net.shm import CannotShare, Channel, Door, Layout, Waiting, functions, knock
from pannier.net.shm.spin import SPIN_US, Spin

from .child import child

LAYOUT = Layout(2, (1 << 16, 1 << 16))
NOTICED_S = 1.0
PATIENCE_S = 20.0
MESSAGES = 3000
pytestmark = [pytest.mark.timeout(60)]
try:
    functions()
except CannotShare as missing:  # as on a machine without a compiler
    pytestmark.append(pytest.mark.skip(reason=str(missing)))


def _let_in(door: Door) -> Channel:
    deadline = time.monotonic() + PATIENCE_S
    while (channel := door.open()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return channel


def _send(channel: Channel, lane: int, header: bytes, payload: bytes, waiting: Waiting) -> None:
    while (start := channel.writers[lane].reserve(header, len(payload))) is None:
        waiting.wait(1)
    channel.memory.view[start : start + len(payload)] = payload
    channel.publish(lane)


def _receive(channel: Channel, waiting: Waiting) -> tuple[int, bytes, bytes]:
    deadline = time.monotonic() + PATIENCE_S
    while (record := channel.receive()) is None:
        assert not channel.is_lost
        assert time.monotonic() < deadline
        waiting.wait(None)
    payload = bytes(channel.memory.view[record.start : record.start + record.length])
    channel.release()
    return record.lane, record.header, payload


def _echo(said: Connection, spin_us: int) -> None:
    """Serve one peer: send back what comes until it says goodbye."""
    door, waiting = Door(), Waiting(spin_us)
    said.send(door.address)
    channel = _let_in(door)
    waiting.add(channel)
    header = b""
    while header != b"goodbye":
        lane, header, payload = _receive(channel, waiting)
        _send(channel, lane, header, payload, waiting)


def _knock_and_sleep(said: Connection, door: str) -> None:
    channel = knock(door, "compute", "attention", LAYOUT)
    channel.writers[0].reserve(b"last words", 0)
    channel.publish(0)
    said.send("knocked")
    time.sleep(PATIENCE_S)


@pytest.mark.slow
@pytest.mark.parametrize("spin_us", [0, SPIN_US])
def test_no_message_waits_for_a_reader_that_sleeps(spin_us: int) -> None:
    """Thousands of round trips with pauses of all lengths in between: a wake-up that is lost would stop them."""
    with child(_echo, spin_us) as (_, said):
        waiting = Waiting(spin_us)
        channel = knock(said.recv(), "compute", "attention", LAYOUT)
        waiting.add(channel)
        for number in range(MESSAGES):
            lane, header, payload = number % 2, b"%d" % number, bytes([number % 251]) * (number % 9000)
            _send(channel, lane, header, payload, waiting)
            assert _receive(channel, waiting) == (lane, header, payload)
            if number % 100 == 0:
                time.sleep(0.001 * (number % 7))
        _send(channel, 0, b"goodbye", b"", waiting)
        assert _receive(channel, waiting)[1] == b"goodbye"
        channel.close()


@pytest.mark.slow
def test_a_killed_attention_worker_is_missed_at_once() -> None:
    with child(_echo, 0) as (process, said):
        waiting = Waiting(0)
        channel = knock(said.recv(), "compute", "attention", LAYOUT)
        waiting.add(channel)
        _send(channel, 0, b"hello", b"", waiting)
        assert _receive(channel, waiting)[1] == b"hello"
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        started = time.monotonic()
        while not channel.is_lost:
            waiting.wait(int(PATIENCE_S * 1000))
        assert time.monotonic() - started < NOTICED_S
        waiting.remove(channel)
        channel.close()
    with pytest.raises(CannotShare, match="can't be reached"):
        knock(_closed_address(), "compute", "attention", LAYOUT)


@pytest.mark.slow
def test_a_killed_compute_worker_is_missed_at_once_and_leaves_nothing() -> None:
    """Its last words can still be read; then neither mapping nor file of its memory is left in this process."""
    door = Door()
    with child(_knock_and_sleep, door.address) as (process, said):
        assert said.recv() == "knocked"
        channel, waiting = _let_in(door), Waiting(0)
        waiting.add(channel)
        assert _mappings() == 1
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        started = time.monotonic()
        while not channel.is_lost:
            if (record := channel.receive()) is not None:
                assert record.header == b"last words"
                channel.release()
            waiting.wait(int(PATIENCE_S * 1000))
        assert time.monotonic() - started < NOTICED_S
        waiting.remove(channel)
        channel.close()
        del channel, waiting, record
    door.close()
    assert _mappings() == 0
    assert not list(Path("/dev/shm").glob("*pannier*"))


@pytest.mark.slow
def test_a_process_that_is_stopped_is_not_taken_for_dead_and_hinders_nobody() -> None:
    """Its rings fill up, and those of others don't."""
    with child(_knock_and_sleep, (door := Door()).address) as (process, said):
        assert said.recv() == "knocked"
        stopped = _let_in(door)
        other = knock(door.address, "other", "attention", LAYOUT)
        served = _let_in(door)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        while stopped.writers[0].reserve(b"answer", 1000) is not None:
            stopped.publish(0)
        stopped.hear()
        assert not stopped.is_lost
        assert served.writers[0].reserve(b"answer", 1000) is not None
        served.publish(0)
        record = other.receive()
        assert record is not None
        assert record.header == b"answer"
        for channel in (stopped, other, served):
            channel.close()
    door.close()


def test_a_sleeper_is_rung_once() -> None:
    """And nobody else is rung at all: a bell costs more than a message."""
    door = Door()
    compute = knock(door.address, "compute", "attention", LAYOUT)
    attention = _let_in(door)
    functions().fall_asleep(attention.readers._all.address, 2)
    rung = []
    for lane in (0, 1, 0):
        assert compute.writers[lane].reserve(b"x", 0) is not None
        rung.append(compute.writers[lane].publish())
    assert rung == [True, False, False]
    assert not functions().fall_asleep(attention.readers._all.address, 2), "there is something to read"
    for channel in (compute, attention):
        channel.close()
    door.close()


def test_sockets_are_looked_at_while_rings_never_rest() -> None:
    """A flood through shared memory leaves the gateway its turn."""
    door, waiting, context = Door(), Waiting(0), zmq.Context()
    pair = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    pair[0].bind("inproc://gateway")
    pair[1].connect("inproc://gateway")
    compute = knock(door.address, "compute", "attention", LAYOUT)
    attention = _let_in(door)
    waiting.register(pair[1])
    waiting.add(attention)
    pair[0].send(b"fence")
    waits = 0
    ready: dict[Any, int] = {}
    while not ready:
        assert compute.writers[0].reserve(b"flood", 0) is not None
        compute.publish(0)
        ready = waiting.wait(None)
        assert attention.receive() is not None
        attention.release()
        waits += 1
        assert waits < 100
    assert pair[1] in ready
    waiting.remove(attention)
    for channel in (compute, attention):
        channel.close()
    door.close()
    context.destroy()


def test_who_is_rude_is_not_let_in_and_others_are() -> None:
    """Noise, silence, and a greeting without memory."""
    door = Door()
    name = "\0" + door.address.rpartition("/")[2]
    greetings = [b"", b"noise", msgspec.msgpack.encode(("rude", LAYOUT)), bytes(5000)]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.connect(name)
        for greeting in greetings:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as rude:
                rude.connect(name)
                rude.send(greeting)
                with pytest.raises(CannotShare):
                    _let_in(door)
        polite = knock(door.address, "polite", "attention", LAYOUT)
        let_in = _let_in(door)
        assert let_in.peer == "polite"
        for channel in (polite, let_in):
            channel.close()
    door.close()


@pytest.mark.parametrize(
    ("address", "said"),
    [("shm://0123-another-boot/pannier-x", "is on another host"), ("closed", "can't be reached within this host")],
)
def test_who_cannot_be_reached_is_told_why(address: str, said: str) -> None:
    with pytest.raises(CannotShare, match=said):
        knock(_closed_address() if address == "closed" else address, "compute", "attention", LAYOUT)


def _closed_address() -> str:
    door = Door()
    door.close()
    return door.address


def _mappings() -> int:
    return Path("/proc/self/maps").read_text().count("pannier-link")


def test_spinning_stops_when_cores_are_scarce(tmp_path: Path) -> None:
    """More processes than cores, or more threads that could run: whoever spins keeps others from running."""
    load = tmp_path / "loadavg"
    load.write_text("0.5 0.5 0.5 2/100 1234\n")
    assert Spin(50, load, cores=4).budget_ns(processes=2) == 50_000
    assert Spin(50, load, cores=4).budget_ns(processes=5) == 0
    assert Spin(50, load, cores=1).budget_ns(processes=2) == 0
    assert Spin(0, load, cores=4).budget_ns(processes=2) == 0
    load.write_text("9.5 9.5 9.5 9/100 1234\n")
    assert Spin(50, load, cores=4).budget_ns(processes=2) == 0
    assert Spin(50, tmp_path / "missing", cores=4).budget_ns(processes=2) == 50_000


def test_threads_may_close_what_others_wait_for() -> None:
    """A peer in this very process that hangs up wakes who waits."""
    door, waiting = Door(), Waiting(0)
    compute = knock(door.address, "compute", "attention", LAYOUT)
    attention = _let_in(door)
    waiting.add(attention)
    threading.Timer(0.05, compute.close).start()
    started = time.monotonic()
    while not attention.is_lost:
        waiting.wait(int(PATIENCE_S * 1000))
    assert time.monotonic() - started < 5
    waiting.remove(attention)
    attention.close()
    door.close()
