"""Rings in shared memory: every message comes out once, whole and in order, wherever it lies."""

import struct
from collections import deque
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pannier.net.shm import CannotShare, Channel, Door, Layout, functions, knock
from pannier.net.shm.memory import MAX_BYTES, MAX_LANES, Direction, make, take
from pannier.wire import WireError

PAGE = 4096
pytestmark = [pytest.mark.timeout(60)]
try:
    functions()
except CannotShare as missing:  # as on a machine without a compiler
    pytestmark.append(pytest.mark.skip(reason=str(missing)))


class Pair:
    """Both ends of a channel, in this process."""

    def __init__(self, layout: Layout) -> None:
        self.door = Door()
        self.compute = knock(self.door.address, "compute", "attention", layout)
        attention = self.door.open()
        assert attention is not None
        self.attention = attention

    def __enter__(self) -> "Pair":
        return self

    def __exit__(self, *_: object) -> None:
        self.compute.close()
        self.attention.close()
        self.door.close()


def write(channel: Channel, lane: int, header: bytes, payload: bytes) -> bool:
    """Send a message; False if there is no room."""
    start = channel.writers[lane].reserve(header, len(payload))
    if start is None:
        return False
    assert start % 64 == 0
    channel.memory.view[start : start + len(payload)] = payload
    channel.publish(lane)
    return True


def read(channel: Channel) -> tuple[int, bytes, bytes] | None:
    """Take the next message."""
    record = channel.receive()
    if record is None:
        return None
    payload = bytes(channel.memory.view[record.start : record.start + record.length])
    channel.release()
    return record.lane, record.header, payload


messages = st.tuples(st.integers(0, 2), st.binary(min_size=1, max_size=200), st.integers(0, 1700))
actions = st.lists(st.one_of(messages, st.just("read"), st.just("read")), max_size=300)


@given(actions, st.sampled_from(Direction))
@settings(deadline=None)
def test_messages_come_out_once_whole_and_in_order(actions: list[object], direction: Direction) -> None:
    """Whatever their sizes: around the end, into a full ring, in an empty one; lanes don't mix."""
    with Pair(Layout(3, (PAGE, 2 * PAGE))) as pair:
        writer, reader = (
            (pair.compute, pair.attention) if direction is Direction.TO_ATTENTION else (pair.attention, pair.compute)
        )
        under_way: list[deque[tuple[bytes, bytes]]] = [deque() for _ in range(3)]
        for number, action in enumerate(actions):
            if isinstance(action, tuple):
                lane, header, size = action
                payload = bytes([number % 251]) * size
                if write(writer, lane, header, payload):
                    under_way[lane].append((header, payload))
                else:
                    assert under_way[lane], "an empty ring takes every message that is not too large"
            else:
                _check_next(reader, under_way)
        while any(under_way):
            _check_next(reader, under_way)
        assert read(reader) is None


def _check_next(reader: Channel, under_way: list[deque[tuple[bytes, bytes]]]) -> None:
    came = read(reader)
    if came is None:
        assert not any(under_way)
    else:
        lane, *message = came
        assert tuple(message) == under_way[lane].popleft()


def test_a_message_that_is_too_large_is_refused_with_its_size() -> None:
    with Pair(Layout(1, (PAGE, PAGE))) as pair:
        with pytest.raises(WireError, match="larger than shared memory takes, which is 4096"):
            write(pair.compute, 0, b"header", bytes(4000))
        assert write(pair.compute, 0, b"header", bytes(3900))


def test_a_full_ring_takes_more_once_something_is_read_and_others_go_on() -> None:
    with Pair(Layout(2, (PAGE, PAGE))) as pair:
        sent = 0
        while write(pair.compute, 0, b"%d" % sent, bytes(1000)):
            sent += 1
        assert sent == 3, "each takes 1,088 bytes"
        assert write(pair.compute, 1, b"other lane", b"")
        taken = [read(pair.attention), read(pair.attention)]
        assert taken == [(0, b"0", bytes(1000)), (1, b"other lane", b"")]
        assert write(pair.compute, 0, b"3", bytes(1000))


def test_a_message_is_not_overwritten_before_it_is_released() -> None:
    with Pair(Layout(1, (PAGE, PAGE))) as pair:
        assert write(pair.compute, 0, b"a", b"x" * 1800)
        record = pair.attention.receive()
        assert record is not None
        assert write(pair.compute, 0, b"b", b"y" * 1800)
        assert not write(pair.compute, 0, b"c", b"z" * 1800)
        assert bytes(pair.attention.memory.view[record.start : record.start + record.length]) == b"x" * 1800
        pair.attention.release()
        assert write(pair.compute, 0, b"c", b"z" * 1800)


def test_small_messages_end_with_the_slots_and_go_on_when_one_is_read() -> None:
    with Pair(Layout(1, (64 * PAGE, PAGE))) as pair:
        for number in range(64):
            assert write(pair.compute, 0, b"%d" % number, b"")
        assert not write(pair.compute, 0, b"64", b"")
        assert read(pair.attention) == (0, b"0", b"")
        assert write(pair.compute, 0, b"64", b"")


def test_an_alternating_lane_stays_at_the_front_of_its_ring() -> None:
    """So that it stays in the caches."""
    with Pair(Layout(1, (64 * PAGE, PAGE))) as pair:
        places = set()
        for _ in range(50):
            assert write(pair.compute, 0, b"request", bytes(1000))
            record = pair.attention.receive()
            assert record is not None
            places.add(record.start)
            pair.attention.release()
        assert len(places) == 1


numbers = st.one_of(st.integers(0, 2 * PAGE), st.integers(0, (1 << 64) - 1))


@given(st.tuples(numbers, numbers, numbers), st.one_of(st.integers(1, 100), numbers))
@settings(deadline=None)
def test_nonsense_in_a_ring_ends_the_channel_and_nothing_else(slot: tuple[int, int, int], written: int) -> None:
    """Whatever a peer that has gone mad writes, nothing outside its ring is read."""
    with Pair(Layout(1, (PAGE, PAGE))) as pair:
        place = pair.compute.memory.layout.ring(Direction.TO_ATTENTION, 0)
        view = pair.compute.memory.view
        struct.pack_into("<3Q", view, place.slots, *slot)
        struct.pack_into("<Q", view, place.written, written)
        record = pair.attention.receive()
        if record is None:
            assert pair.attention.is_lost or written == 0
        else:
            assert place.start <= record.start <= record.start + record.length <= place.start + place.capacity


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        (Layout(0, (PAGE, PAGE)), "1 to 64 lanes"),
        (Layout(MAX_LANES + 1, (PAGE, PAGE)), "1 to 64 lanes"),
        (Layout(1, (PAGE, 100)), "whole pages"),
        (Layout(1, (0, PAGE)), "whole pages"),
        (Layout(1, (MAX_BYTES, PAGE)), "above the limit"),
    ],
)
def test_sizes_are_checked_before_memory_is_taken(layout: Layout, said: str) -> None:
    with pytest.raises(CannotShare, match=said):
        make(layout)


def test_what_is_handed_over_must_have_the_size_that_is_said() -> None:
    memory, file = make(Layout(1, (PAGE, PAGE)))
    with pytest.raises(CannotShare, match="due are"):
        take(file, Layout(2, (PAGE, PAGE)))
    assert take(file, memory.layout).layout == memory.layout


@given(st.integers(1, MAX_LANES), st.integers(1, 50), st.integers(1, 50))
def test_nothing_lies_on_anything_else(lanes: int, to_attention: int, to_compute: int) -> None:
    layout = Layout(lanes, (to_attention * PAGE, to_compute * PAGE))
    ranges = [(layout.asleep(direction), 4) for direction in Direction]
    for direction in Direction:
        for lane in range(lanes):
            ring = layout.ring(direction, lane)
            ranges += [(ring.written, 8), (ring.freed, 8), (ring.slots, 64 * 32), (ring.start, ring.capacity)]
            assert ring.capacity == layout.capacities[direction]
    ranges.sort()
    assert all(start + size <= after for (start, size), (after, _) in pairwise(ranges))
    assert sum(ranges[-1]) == layout.total
