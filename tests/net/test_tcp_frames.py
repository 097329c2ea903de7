"""Frames over a stream of bytes: every message comes out once, whole, in order and aligned, however it is cut."""

import mmap
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, repeat

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pannier.net.tcp.frame import MAGIC, PREFIX, ZEROS, write_head
from pannier.net.tcp.reader import GLANCE, STAGING, Reader
from pannier.wire import WireError

LIMIT = 4 * STAGING
pytestmark = pytest.mark.timeout(60)
careful = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])


class Arriving:
    """A reader, and the other end of what it reads."""

    def __init__(self, limit: int = LIMIT) -> None:
        ours, self.theirs = socket.socketpair()
        ours.setblocking(False)
        self.theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * LIMIT)
        self.allocated: list[int] = []
        self.reader = Reader(ours, limit, self._allocate)
        self._ours = ours

    def _allocate(self, size: int) -> memoryview:
        self.allocated.append(size)
        return memoryview(mmap.mmap(-1, size))  # which begins with a page

    def read(self) -> list[tuple[bytes, bytes]]:
        """What is complete now, headers and payloads; all of it begins at 64 bytes."""
        self.reader.notice()
        messages = []
        while (record := self.reader.receive()) is not None:
            assert record.start % 64 == 0
            messages.append((bytes(record.header), bytes(record.memory[record.start : record.stop])))
        assert not self.reader.is_ready
        return messages

    def close(self) -> None:
        self._ours.close()
        self.theirs.close()


@contextmanager
def arriving(limit: int = LIMIT) -> Iterator[Arriving]:
    pair = Arriving(limit)
    try:
        yield pair
    finally:
        pair.close()


def framed(header: bytes, payload: bytes) -> bytes:
    return write_head(header, len(payload), LIMIT) + payload + bytes(ZEROS[: -len(payload) % 64])


sizes = st.one_of(st.integers(0, 300), st.sampled_from([63, 64, 65, GLANCE, STAGING - 128, STAGING, 2 * STAGING + 7]))
messages = st.lists(st.tuples(st.binary(max_size=200), sizes), max_size=12)
cuts = st.lists(st.integers(1, 3 * GLANCE), min_size=1, max_size=40)


@given(messages, cuts)
@careful
def test_messages_come_out_whole_and_in_order(sent: list[tuple[bytes, int]], cuts: list[int]) -> None:
    """Whatever their sizes, and wherever the network cuts them."""
    payloads = [(header, bytes([number + 1]) * size) for number, (header, size) in enumerate(sent)]
    stream = b"".join(framed(*message) for message in payloads)
    with arriving() as pair:
        came: list[tuple[bytes, bytes]] = []
        for cut in chain(cuts, repeat(2 * GLANCE)):
            if not stream:
                break
            pair.theirs.sendall(stream[:cut])
            stream = stream[cut:]
            came += pair.read()
        assert came == payloads
        assert all(STAGING < size <= LIMIT for size in pair.allocated), "only what is large has memory of its own"


@given(st.binary(max_size=400))
@careful
def test_noise_is_refused_or_waited_for(noise: bytes) -> None:
    """And no memory is taken for it."""
    with arriving() as pair:
        pair.theirs.sendall(noise)
        if len(noise) < PREFIX.size:
            assert pair.read() == []
        else:
            with pytest.raises(WireError):
                pair.read()
        assert not pair.allocated


numbers = st.one_of(st.integers(0, 300), st.integers(0, (1 << 32) - 1))


@given(numbers, st.one_of(numbers, st.integers(0, (1 << 64) - 1)), st.binary(max_size=300))
@careful
def test_lengths_are_checked_before_memory_is_taken(header: int, payload: int, rest: bytes) -> None:
    """Whatever a prefix says, no more is taken than was agreed on."""
    limit = 2 * STAGING
    with arriving(limit) as pair:
        pair.theirs.sendall(struct.pack("<4sIQ", MAGIC, header, payload) + rest)
        try:
            came = pair.read()
        except WireError:
            return
        finally:
            assert all(size <= limit for size in pair.allocated)
        assert all(len(header) + len(payload) <= len(rest) for header, payload in came)


def test_a_message_above_the_limit_is_refused_by_its_sender_too() -> None:
    with pytest.raises(WireError, match="a message of 4160 bytes is larger than this connection takes, which is 4096"):
        write_head(b"header", 4096, 4096)


@pytest.mark.parametrize("size", [100, 3 * STAGING])
@pytest.mark.parametrize("left_out", [1, 70, "half"])
def test_a_peer_that_goes_in_the_middle_of_a_frame(size: int, left_out: int | str) -> None:
    """What was whole comes out, the rest never does, and the end is noticed."""
    last = framed(b"last", bytes(size))
    stop = len(last) // 2 if isinstance(left_out, str) else len(last) - left_out
    with arriving() as pair:
        pair.theirs.sendall(framed(b"first", b"payload") + last[:stop])
        assert pair.read() == [(b"first", b"payload")]
        pair.theirs.close()
        with pytest.raises(ConnectionError, match="hung up"):
            pair.read()


def test_small_messages_stay_until_the_next_is_received_and_large_ones_for_good() -> None:
    with arriving() as pair:
        pair.theirs.sendall(framed(b"small", b"s" * 100) + framed(b"large", b"l" * STAGING))
        pair.reader.notice()
        small = pair.reader.receive()
        assert small is not None
        assert small.memory is pair.reader.staging
        assert bytes(small.memory[small.start : small.stop]) == b"s" * 100
        large = pair.reader.receive()
        assert large is not None
        pair.theirs.sendall(framed(b"large", b"m" * STAGING))
        assert pair.read() == [(b"large", b"m" * STAGING)]
        assert bytes(large.memory[large.start : large.stop]) == b"l" * STAGING
