"""Connections over plain TCP: nobody waits for a peer that doesn't read, and who is rude is not let in."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from pannier.net import Exposed, NetError, PortBusy, SocketOptions
from pannier.net.errors import PeerGone
from pannier.net.keys import make_keys, worker_keys
from pannier.net.shm import Waiting
from pannier.net.tcp import CannotTalk, Hello, Listener, Stream, dial, parse
from pannier.net.tcp.frame import write_head
from pannier.net.tcp.listener import MAX_CALLERS, MAX_HELLO
from pannier.net.tcp.writer import CAPACITY

ANY = "tcp://127.0.0.1:0"
LIMIT = 1 << 24
HELLO = Hello("", "compute", 0, (LIMIT, LIMIT))
PATIENCE_S = 20.0
pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """No test leaves a file open."""
    before = _open_files()
    yield
    left = _open_files() - before
    assert not left, f"the test left files open: {left}"


def _open_files() -> set[str]:
    names = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            names.add(f"{number} {os.readlink(f'/proc/self/fd/{number}')}")
        except FileNotFoundError:  # the listing's own
            continue
    return {name for name in names if "socket" in name or "eventpoll" in name}


def fresh() -> Callable[[int], memoryview]:
    return lambda size: memoryview(bytearray(size))


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener(ANY, SocketOptions(max_bytes=1 << 26), fresh)
    yield listener
    listener.close()


def let_in(listener: Listener) -> Stream:
    deadline = time.monotonic() + PATIENCE_S
    while (accepted := listener.accept()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return accepted[0]


@contextmanager
def connected(listener: Listener, hello: Hello = HELLO) -> Iterator[tuple[Stream, Stream]]:
    """Both ends: who dialled, and who listens."""
    ours = dial(listener.address, "attention", hello, SocketOptions(), fresh())
    theirs = let_in(listener)
    try:
        yield ours, theirs
    finally:
        ours.close()
        theirs.close()


def say(stream: Stream, header: bytes, payload: bytes = b"") -> None:
    gap = bytes(-len(payload) % 64)
    stream.send([write_head(header, len(payload), stream.largest), payload, gap])


def hear(stream: Stream) -> tuple[bytes, bytes] | None:
    stream.notice()
    record = stream.receive()
    return None if record is None else (bytes(record.header), bytes(record.memory[record.start : record.stop]))


def wait_to_hear(stream: Stream) -> tuple[bytes, bytes]:
    deadline = time.monotonic() + PATIENCE_S
    while (heard := hear(stream)) is None:
        assert time.monotonic() < deadline
        assert not stream.is_lost, stream.reason
    return heard


def wait_until_lost(stream: Stream) -> str:
    deadline = time.monotonic() + PATIENCE_S
    while not stream.is_lost:
        hear(stream)
        assert time.monotonic() < deadline
    return stream.reason


def test_who_dials_may_send_at_once(listener: Listener) -> None:
    """Before the other end has noticed anything; and its name and sizes are known then."""
    ours = dial(listener.address, "attention", Hello("", "c7", 3, (5000, 6000)), SocketOptions(), fresh())
    say(ours, b"first")
    theirs = let_in(listener)
    assert (theirs.peer, theirs.reader.limit, theirs.largest) == ("c7", 5000, 6000)
    assert wait_to_hear(theirs) == (b"first", b"")
    say(theirs, b"answer", b"payload")
    assert wait_to_hear(ours) == (b"answer", b"payload")
    ours.close()
    assert "hung up" in wait_until_lost(theirs)
    theirs.close()


def test_two_that_flood_each_other_do_not_wait_for_each_other(listener: Listener) -> None:
    """Each has sent more than the system takes before the other reads; all of it arrives, in order."""
    count, size = 40, 1 << 20
    with connected(listener) as ends:
        for number in range(count):
            for end in ends:
                say(end, b"%d" % number, bytes([number]) * size)
        assert not any(end.flush() for end in ends), "the system has taken everything: this proves nothing"
        heard: tuple[list[Any], list[Any]] = ([], [])
        deadline = time.monotonic() + PATIENCE_S
        while min(map(len, heard)) < count:
            assert time.monotonic() < deadline
            for end, came in zip(ends, heard, strict=True):
                end.flush()
                if (message := hear(end)) is not None:
                    came.append(message)
        expected = [(b"%d" % number, bytes([number]) * size) for number in range(count)]
        assert heard[0] == heard[1] == expected


def test_a_peer_that_reads_nothing_costs_a_bounded_number_of_messages_and_hinders_nobody(listener: Listener) -> None:
    with connected(listener) as (deaf, _), connected(listener) as (ours, theirs):
        while len(deaf.writer.waiting) < CAPACITY:
            say(deaf, b"header", bytes(1 << 16))
        with pytest.raises(PeerGone, match=f"has not read {CAPACITY} pieces"):
            say(deaf, b"one more")
        assert len(deaf.writer.waiting) < CAPACITY + 3
        say(ours, b"hello")
        assert wait_to_hear(theirs) == (b"hello", b"")


def test_what_arrives_a_few_bytes_at_a_time_is_put_together(listener: Listener) -> None:
    """A slow peer, in its first message too."""
    with socket.create_connection(parse(listener.address)[:2]) as slow:
        slow.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        hello = msgspec.structs.replace(HELLO, ticket=parse(listener.address).ticket)
        said = write_head(msgspec.msgpack.encode(hello), 0, MAX_HELLO)
        for byte in said:
            assert listener.accept() is None
            slow.sendall(bytes([byte]))
        theirs = let_in(listener)
        frame = write_head(b"header", 64, LIMIT) + b"p" * 64
        for place in range(0, len(frame), 5):
            assert hear(theirs) is None
            slow.sendall(frame[place : place + 5])
        assert wait_to_hear(theirs) == (b"header", b"p" * 64)
        theirs.close()


def test_noise_ends_its_own_connection_only(listener: Listener) -> None:
    with connected(listener) as (ours, theirs), connected(listener) as (other, others):
        ours.writer.send([b"x" * 64])
        assert "begins no frame" in wait_until_lost(theirs)
        say(other, b"hello")
        assert wait_to_hear(others) == (b"hello", b"")


def test_a_frame_larger_than_agreed_ends_the_connection_before_memory_is_taken(listener: Listener) -> None:
    with connected(listener, Hello("", "compute", 0, (4096, 4096))) as (ours, theirs):
        ours.largest = LIMIT  # as a peer that doesn't keep to it
        say(ours, b"header", bytes(8192))
        assert "larger than this connection takes, which is 4096" in wait_until_lost(theirs)


def _wrong_ticket(_: str) -> bytes:
    return write_head(msgspec.msgpack.encode(msgspec.structs.replace(HELLO, ticket="0" * 32)), 0, MAX_HELLO)


def _huge(ticket: str) -> bytes:
    hello = Hello(ticket, "greedy", 0, (1 << 40, 1 << 20))
    return write_head(msgspec.msgpack.encode(hello), 0, MAX_HELLO)


def _tiny(ticket: str) -> bytes:
    return write_head(msgspec.msgpack.encode(Hello(ticket, "modest", 0, (1 << 20, 10))), 0, MAX_HELLO)


@pytest.mark.parametrize(
    ("says", "reason"),
    [
        (lambda _: b"", "did not say who it is"),
        (lambda _: b"PNR", "did not say who it is"),
        (lambda _: b"GET / HTTP/1.1\r\nHost: attention\r\n\r\n", "begins no frame"),
        (lambda _: write_head(b"", 1 << 30, LIMIT << 10), "larger than this connection takes"),
        (lambda _: write_head(b"noise", 0, MAX_HELLO), "said nonsense"),
        (lambda _: write_head(msgspec.msgpack.encode(["Hello", "t"]), 0, MAX_HELLO), "said nonsense"),
        (_wrong_ticket, "a ticket that is not this process's"),
        (_huge, "wants frames of"),
        (_tiny, "wants frames of"),
    ],
    ids=["silence", "too little", "http", "large", "noise", "fields", "ticket", "huge frames", "tiny frames"],
)
def test_who_is_rude_is_not_let_in_and_others_are(
    listener: Listener, says: Callable[[str], bytes], reason: str
) -> None:
    with socket.create_connection(parse(listener.address)[:2]) as rude:
        rude.sendall(says(parse(listener.address).ticket))
        rude.shutdown(socket.SHUT_WR)
        with pytest.raises(CannotTalk, match=reason):
            let_in(listener)
    with connected(listener) as (ours, theirs):
        say(ours, b"hello")
        assert wait_to_hear(theirs) == (b"hello", b"")


def test_the_silent_have_to_go_when_there_are_too_many(listener: Listener) -> None:
    """Whoever only dials can't use up all files of a process."""
    where = parse(listener.address)[:2]
    silent = []
    for _ in range(MAX_CALLERS + 8):
        silent.append(socket.create_connection(where))
        assert listener.accept() is None
    before = len(_open_files())
    with connected(listener) as (ours, theirs):
        say(ours, b"hello")
        assert wait_to_hear(theirs) == (b"hello", b"")
        assert len(_open_files()) <= before + 2
    assert silent[0].recv(1) == b"", "it has been hung up on"
    for each in silent:
        each.close()


def test_nobody_there_is_noticed_and_nothing_waits() -> None:
    closed = Listener(ANY, SocketOptions(), fresh)
    closed.close()
    started = time.monotonic()
    ours = dial(closed.address, "attention", HELLO, SocketOptions(), fresh())
    assert time.monotonic() - started < 1
    assert "refused" in wait_until_lost(ours)
    with pytest.raises(PeerGone, match="attention has gone"):
        say(ours, b"hello")
    ours.close()


def test_plain_tcp_keeps_to_the_rules_of_other_sockets(tmp_path: Path, listener: Listener) -> None:
    """No address that others reach unless that is allowed, nor where links are encrypted; busy ports are named."""
    with pytest.raises(Exposed, match="insecure"):
        Listener("tcp://0.0.0.0:0", SocketOptions(), fresh)
    with pytest.raises(Exposed, match="insecure"):
        dial("tcp://192.0.2.1:5000/ticket", "attention", HELLO, SocketOptions(), fresh())
    Listener("tcp://0.0.0.0:0", SocketOptions(insecure=True), fresh).close()
    make_keys(tmp_path)
    _, links = worker_keys(tmp_path)
    with pytest.raises(CannotTalk, match="is not encrypted"):
        Listener(ANY, SocketOptions(curve=links), fresh)
    with pytest.raises(PortBusy, match="is in use by another process"):
        Listener(listener.address.rpartition("/")[0], SocketOptions(), fresh)
    for wrong in ("tcp://127.0.0.1", "tcp://127.0.0.1:70000", "ipc:///tmp/x", "127.0.0.1:5000"):
        with pytest.raises(NetError):
            Listener(wrong, SocketOptions(), fresh)


def test_a_connection_sends_at_once_and_without_pauses(listener: Listener) -> None:
    """Where the system's own way is to pace what is sent, another is chosen."""
    with connected(listener) as ends:
        for end in ends:
            with socket.socket(fileno=os.dup(end.fileno())) as same:
                assert same.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                assert same.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                assert b"bbr" not in same.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)


def test_a_message_wakes_who_waits_and_what_was_read_already_does_not_let_it_sleep(listener: Listener) -> None:
    waiting = Waiting(0)
    with connected(listener) as (ours, theirs):
        waiting.add_stream(theirs)
        assert waiting.wait(0) == {}
        assert not theirs.reader.is_ready
        for number in range(3):
            say(ours, b"%d" % number)
        deadline = time.monotonic() + PATIENCE_S
        for number in range(3):
            while (record := theirs.receive()) is None:
                waiting.wait(int(PATIENCE_S * 1000))
                assert time.monotonic() < deadline
            assert bytes(record.header) == b"%d" % number
        assert theirs.receive() is None
        ours.close()
        waiting.wait(int(PATIENCE_S * 1000))
        assert theirs.receive() is None
        assert theirs.is_lost
        waiting.remove_stream(theirs)
        assert waiting.wait(0) == {}


def test_who_has_more_to_send_is_woken_by_room(listener: Listener) -> None:
    """Not by trying again and again."""
    waiting = Waiting(0)
    with connected(listener) as (ours, theirs):
        waiting.add_stream(ours)
        for _ in range(20):
            say(ours, b"header", bytes(1 << 20))
        reading = threading.Thread(target=lambda: [wait_to_hear(theirs) for _ in range(20)])
        reading.start()
        started = time.monotonic()
        while not ours.flush():
            waiting.wait(int(PATIENCE_S * 1000))
        assert time.monotonic() - started < PATIENCE_S
        reading.join()
        assert waiting.wait(0) == {}
        waiting.remove_stream(ours)


def test_sockets_are_looked_at_while_streams_never_rest(listener: Listener) -> None:
    """A flood of answers leaves the gateway its turn."""
    waiting, context = Waiting(0), zmq.Context()
    pair = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    pair[0].bind("inproc://gateway")
    pair[1].connect("inproc://gateway")
    with connected(listener) as (ours, theirs):
        waiting.register(pair[1])
        waiting.add_stream(theirs)
        pair[0].send(b"fence")
        ready: dict[Any, int] = {}
        waits = 0
        while pair[1] not in ready:
            say(ours, b"flood")
            ready = waiting.wait(None)
            theirs.receive()
            waits += 1
            assert waits < 100
        waiting.remove_stream(theirs)
    context.destroy()
