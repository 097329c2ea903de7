"""The payload frame is exactly as long as its parts say, and laid out in the one legal way."""

import tracemalloc

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pannier.wire import (
    ALIGNMENT,
    AttentionToCompute,
    ComputeToAttention,
    Decoder,
    Dtype,
    Part,
    WireError,
    encode,
    lay_out,
    payload_bytes,
)
from pannier.wire import messages as m

from .strategies import layouts

pytestmark = pytest.mark.timeout(30)
decoder: Decoder[m.Piece] = Decoder(ComputeToAttention)
PARTS = lay_out([(Dtype.FLOAT32, (3, 2)), (Dtype.INT8, (5,))])
PAYLOAD = bytes(payload_bytes(PARTS))


def piece(parts: tuple[Part, ...]) -> m.Piece:
    return m.Piece(1, 2, 3, 0, 0, 0, False, 0, parts)


def frames_of(message: m.Message, *payload: bytes) -> list[bytes]:
    """Frames as a peer that checks nothing would send them."""
    return [msgspec.msgpack.encode(message), *payload]


@settings(max_examples=50, deadline=None)
@given(layouts)
def test_parts_are_aligned_contiguous_and_apart(parts: tuple[Part, ...]) -> None:
    """Each part starts at a multiple of 64 bytes behind the one before, and the last one ends the frame."""
    assert all(part.offset % ALIGNMENT == 0 for part in parts)
    ends = [part.offset + part.nbytes for part in parts]
    assert all(end <= part.offset < end + ALIGNMENT for end, part in zip(ends, parts[1:], strict=False))
    assert payload_bytes(parts) == ends[-1]


@settings(max_examples=50, deadline=None)
@given(layouts, st.integers(-70, 70).filter(bool))
def test_a_payload_of_another_length_is_refused(parts: tuple[Part, ...], change: int) -> None:
    """A byte too many or too few is refused, by the sender already."""
    payload = bytes(max(0, payload_bytes(parts) + change))
    if len(payload) == payload_bytes(parts):
        return
    with pytest.raises(WireError, match="the payload frame has"):
        decoder.decode(frames_of(piece(parts), payload))
    with pytest.raises(WireError, match="the payload frame has"):
        encode(piece(parts), payload)


@pytest.mark.parametrize("offsets", [(0, 24), (0, 0), (64, 128), (0, 128), (0, 65), (64, 0), (-64, 64)], ids=str)
def test_misplaced_parts_are_refused(offsets: tuple[int, int]) -> None:
    """Parts that overlap, leave gaps, stand unaligned or in another order are refused, whatever the frame's length."""
    parts = tuple(Part(part.dtype, part.shape, offset) for part, offset in zip(PARTS, offsets, strict=True))
    for length in (len(PAYLOAD), payload_bytes(parts)):
        with pytest.raises(WireError, match="not laid out"):
            decoder.decode(frames_of(piece(parts), bytes(max(0, length))))


@pytest.mark.parametrize("shape", [(-1,), (-2, -3), (0, -1), (4, -1, 0)])
def test_negative_sizes_are_refused(shape: tuple[int, ...]) -> None:
    """Two negative sizes have a positive product; they are refused all the same."""
    part = Part(Dtype.INT8, shape, 0)
    with pytest.raises(WireError, match="negative size"):
        decoder.decode(frames_of(piece((part,)), bytes(max(0, part.nbytes))))


@pytest.mark.parametrize("shape", [(0, 2**62, 4), (0, 2**64 - 1), (2**40, 0, 2**40), (2**63,)])
def test_sizes_that_no_tensor_can_have_are_refused(shape: tuple[int, ...]) -> None:
    """An empty part passes every test of length; its other sizes must be possible too."""
    with pytest.raises(WireError, match="no tensor can have"):
        decoder.decode(frames_of(piece((Part(Dtype.INT8, shape, 0),)), b""))


def test_sizes_are_checked_before_memory_is_taken() -> None:
    """A header of a few bytes that speaks of terabytes costs no memory."""
    lie = frames_of(piece(lay_out([(Dtype.FLOAT32, (2**20, 2**20))])), bytes(64))
    tracemalloc.start()
    try:
        with pytest.raises(WireError, match="the payload frame has 64 bytes"):
            decoder.decode(lie)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def test_a_dtype_outside_the_table_is_refused() -> None:
    """The table of dtypes is closed."""
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(piece(PARTS)))
    plain[-1][0][0] = "f64"
    with pytest.raises(WireError, match="f64"):
        decoder.decode([msgspec.msgpack.encode(plain), PAYLOAD])


@pytest.mark.parametrize("count", [0, 3, 4])
def test_one_or_two_frames(count: int) -> None:
    """More or fewer frames are no message."""
    with pytest.raises(WireError, match=f"not {count}"):
        decoder.decode([b"x"] * count)


def test_a_payload_comes_with_parts_and_parts_with_a_payload() -> None:
    """A frame that nothing speaks of, and parts whose frame is missing, are refused, empty ones too."""
    end, answer = m.EndStep(1, 2, 3, 0, 4), m.Answer(1, 2, 3, 0, 0, 0.0, lay_out([(Dtype.INT8, (0,))]))
    answers: Decoder[m.Answer] = Decoder(AttentionToCompute)
    for payload in (b"", b"surplus"):
        with pytest.raises(WireError, match="0 parts, and a payload frame"):
            decoder.decode(frames_of(end, payload))
    with pytest.raises(WireError, match="1 parts, and no payload frame"):
        answers.decode(frames_of(answer))
    assert answers.decode(frames_of(answer, b""))[0] == answer


def test_dimensions_without_end_are_refused_unread() -> None:
    """Multiplying a million sizes would take minutes."""
    part = Part(Dtype.INT8, (1 << 62,) * 1_000_000, 0)
    with pytest.raises(WireError, match="1000000 dimensions"):
        decoder.decode(frames_of(piece((part,)), b""))
