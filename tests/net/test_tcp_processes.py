"""Plain TCP between real processes: who dies is missed at once, who is stopped hinders nobody, nothing stays behind."""

import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from pannier.net import SocketOptions
from pannier.net.shm import Waiting
from pannier.net.tcp import Hello, Listener, Stream, dial
from pannier.net.tcp.frame import write_head
from pannier.net.tcp.reader import STAGING

from .child import child

LIMIT = 1 << 24
NOTICED_S = 1.0
PATIENCE_S = 30.0
MESSAGES = 1500
pytestmark = [pytest.mark.slow, pytest.mark.timeout(90)]


def _memory() -> Any:
    return lambda size: memoryview(bytearray(size))


def _listener() -> Listener:
    return Listener("tcp://127.0.0.1:0", SocketOptions(), _memory)


def _dial(address: str, name: str = "compute") -> Stream:
    return dial(address, "attention", Hello("", name, 0, (LIMIT, LIMIT)), SocketOptions(), _memory())


def _let_in(listener: Listener) -> Stream:
    deadline = time.monotonic() + PATIENCE_S
    while (accepted := listener.accept()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return accepted[0]


def _say(stream: Stream, header: bytes, payload: bytes = b"") -> None:
    stream.send([write_head(header, len(payload), stream.largest), payload, bytes(-len(payload) % 64)])


def _hear(stream: Stream, waiting: Waiting) -> tuple[bytes, bytes] | None:
    """The next message; None once the peer is lost."""
    deadline = time.monotonic() + PATIENCE_S
    while (record := stream.receive()) is None:
        if stream.is_lost:
            return None
        assert time.monotonic() < deadline
        waiting.wait(None if stream.flush() else 2)
    return bytes(record.header), bytes(record.memory[record.start : record.stop])


def _echo(said: Connection, spin_us: int) -> None:
    """Serve one peer: send back what comes until it hangs up."""
    listener, waiting = _listener(), Waiting(spin_us)
    said.send(listener.address)
    stream = _let_in(listener)
    waiting.add_stream(stream)
    while (message := _hear(stream, waiting)) is not None:
        _say(stream, *message)


def _dial_and_sleep(said: Connection, address: str) -> None:
    stream = _dial(address)
    _say(stream, b"last words", b"x" * 1000)
    assert stream.flush()
    said.send("dialled")
    time.sleep(PATIENCE_S)


@pytest.mark.parametrize("spin_us", [0, 50])
def test_no_message_waits_for_a_reader_that_sleeps(spin_us: int) -> None:
    """Many round trips of all sizes with pauses in between: a wake-up that is lost would stop them."""
    with child(_echo, spin_us) as (_, said):
        stream, waiting = _dial(said.recv()), Waiting(spin_us)
        waiting.add_stream(stream)
        for number in range(MESSAGES):
            size = 7 * STAGING if number % 100 == 7 else (number * 97) % 20_000
            sent = b"%d" % number, bytes([number % 251]) * size
            _say(stream, *sent)
            assert _hear(stream, waiting) == sent
            if number % 100 == 0:
                time.sleep(0.001 * (number % 7))
        waiting.remove_stream(stream)
        stream.close()


def test_two_processes_that_flood_each_other_go_on() -> None:
    """Large messages, many at once, each sent back while more are sent: nobody blocks."""
    with child(_echo, 0) as (_, said):
        stream, waiting = _dial(said.recv()), Waiting(0)
        waiting.add_stream(stream)
        sent = [(b"%d" % number, bytes([number]) * (1 << 20)) for number in range(48)]
        for message in sent:
            _say(stream, *message)
        assert [_hear(stream, waiting) for _ in sent] == sent
        waiting.remove_stream(stream)
        stream.close()


def test_a_killed_attention_worker_is_missed_at_once() -> None:
    with child(_echo, 0) as (process, said):
        stream, waiting = _dial(said.recv()), Waiting(0)
        waiting.add_stream(stream)
        _say(stream, b"hello")
        assert _hear(stream, waiting) == (b"hello", b"")
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        started = time.monotonic()
        assert _hear(stream, waiting) is None
        assert time.monotonic() - started < NOTICED_S
        waiting.remove_stream(stream)
        stream.close()


def test_a_killed_compute_worker_is_missed_at_once_and_leaves_nothing() -> None:
    """Its last words can still be read; then neither file nor memory of its connection is left in this process."""
    files, maps = _files(), _mappings()
    listener = _listener()
    with child(_dial_and_sleep, listener.address) as (process, said):
        assert said.recv() == "dialled"
        stream, waiting = _let_in(listener), Waiting(0)
        waiting.add_stream(stream)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        started = time.monotonic()
        assert _hear(stream, waiting) == (b"last words", b"x" * 1000)
        assert _hear(stream, waiting) is None
        assert time.monotonic() - started < NOTICED_S
        waiting.remove_stream(stream)
        stream.close()
        del stream, waiting
    listener.close()
    assert _files() == files
    assert _mappings() == maps


def test_a_process_that_is_stopped_is_not_taken_for_dead_and_hinders_nobody() -> None:
    listener = _listener()
    with child(_dial_and_sleep, listener.address) as (process, said):
        assert said.recv() == "dialled"
        stopped = _let_in(listener)
        other = _dial(listener.address, "other")
        served = _let_in(listener)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        for _ in range(30):
            _say(stopped, b"answer", bytes(1 << 20))
        assert not stopped.flush()
        assert not stopped.is_lost
        waiting = Waiting(0)
        waiting.add_stream(other)
        _say(served, b"answer")
        assert _hear(other, waiting) == (b"answer", b"")
        waiting.remove_stream(other)
        for stream in (stopped, other, served):
            stream.close()
    listener.close()


def _files() -> set[str]:
    """Sockets and pollers that are open; processes have files of other kinds."""
    numbers = os.listdir("/proc/self/fd")
    links = {os.readlink(f"/proc/self/fd/{number}") for number in numbers if os.path.exists(f"/proc/self/fd/{number}")}
    return {link for link in links if link.startswith(("socket:", "anon_inode:[eventpoll]"))}


def _mappings() -> int:
    """Of the size of a connection's memory."""
    ranges = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
    return sum(int(stop, 16) - int(start, 16) == STAGING for start, stop in ranges)
