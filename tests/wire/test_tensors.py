"""Tensors of every dtype come out as they went in, wherever the received frame lies in memory."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pannier.wire import ALIGNMENT, ComputeToAttention, Decoder, Dtype, Part, payload_bytes
from pannier.wire import messages as m
from pannier.wire.tensors import TORCH_DTYPES, encode_with, pack, unpack

from .strategies import layouts

pytestmark = pytest.mark.timeout(30)


def random_tensor(part: Part, generator: torch.Generator) -> torch.Tensor:
    """Random bytes seen as the part's dtype, NaN and infinities included."""
    most = 2 if part.dtype is Dtype.BOOL else 256  # other bytes are no booleans
    noise = torch.randint(0, most, (part.nbytes,), dtype=torch.uint8, generator=generator)
    return noise.view(TORCH_DTYPES[part.dtype]).view(part.shape)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    raw = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*raw)


def at_offset(payload: memoryview, offset: int) -> memoryview:
    """The payload in a buffer whose address is `offset` modulo 64."""
    room = bytearray(len(payload) + 2 * ALIGNMENT)
    start = -torch.frombuffer(room, dtype=torch.uint8).data_ptr() % ALIGNMENT + offset
    room[start : start + len(payload)] = payload
    return memoryview(room)[start : start + len(payload)]


def test_the_table_is_complete() -> None:
    """Every dtype of the wire is one of torch, of the same size."""
    assert {dtype: dtype.itemsize for dtype in Dtype} == {d: t.itemsize for d, t in TORCH_DTYPES.items()}


@settings(max_examples=80, deadline=None)
@given(layouts, st.integers(0, ALIGNMENT - 1), st.integers(0, 2**31))
def test_pack_and_unpack(layout: tuple[Part, ...], offset: int, seed: int) -> None:
    """Bit for bit the same, at odd addresses too; parts are laid out as any receiver wants them."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [random_tensor(part, generator) for part in layout]
    parts, payload = pack(tensors)
    assert parts == layout
    assert len(payload) == payload_bytes(parts)
    unpacked = unpack(parts, at_offset(payload, offset))
    assert all(same_bits(*pair) for pair in zip(tensors, unpacked, strict=True))


@pytest.mark.parametrize("dtype", list(Dtype))
def test_strided_tensors_are_packed_as_they_read(dtype: Dtype) -> None:
    """Transposed and sliced tensors are made contiguous on the way."""
    whole = torch.arange(60).view(3, 4, 5).to(TORCH_DTYPES[dtype])
    for strided in (whole.transpose(0, 2), whole[:, 1:3, ::2], whole[1].t(), whole[0, 0, 0]):
        parts, payload = pack([strided])
        (unpacked,) = unpack(parts, payload)
        assert same_bits(unpacked, strided)


def test_an_aligned_frame_is_not_copied() -> None:
    """Tensors of a well-aligned frame are views of it."""
    parts, payload = pack([torch.zeros(3), torch.zeros(4, dtype=torch.bfloat16)])
    frame = at_offset(payload, 0)
    unpacked = unpack(parts, frame)
    frame[0:4] = b"\xff" * 4
    assert unpacked[0][0].isnan()


def test_message_and_tensors_travel_together() -> None:
    """`encode_with` fills in the parts; with nothing but empty tensors there is a payload frame all the same."""
    decoder: Decoder[m.Piece] = Decoder(ComputeToAttention)
    for tensors in ([torch.ones(2, 3), torch.ones(2, dtype=torch.int32)], [torch.empty(0, 2, 3)]):
        frames = encode_with(m.Piece(1, 2, 3, 0, 0, 0, False, 0, ()), tensors)
        message, payload = decoder.decode([memoryview(frames[0]), bytearray(frames[1])])
        assert all(same_bits(*pair) for pair in zip(unpack(message.parts, payload), tensors, strict=True))
