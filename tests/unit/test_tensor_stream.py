"""Tensors over plain TCP: the same on the other side, whatever they are like; memory that is used again in time."""

import time
from collections.abc import Iterator

import pytest
import torch

from pannier.net import SocketOptions
from pannier.net.tcp import Hello, Listener, dial
from pannier.runtime.reused_memory import MOST, ReusedMemory
from pannier.runtime.tensor_stream import SMALL, TensorStream
from pannier.wire import AttentionToCompute, ComputeToAttention, WireError
from pannier.wire import messages as m
from pannier.wire.tensors import WIRE_DTYPES
from pannier.wire.traffic import Traffic

LIMIT = 1 << 24
FRAME = (1, 1, 1, 0)
PIECE = m.Piece(*FRAME, 0, 0, True, 0, ())
PATIENCE_S = 20.0
pytestmark = pytest.mark.timeout(60)


class Pair:
    """Both ends of a connection."""

    def __init__(self) -> None:
        self._listener = Listener("tcp://127.0.0.1:0", SocketOptions(), ReusedMemory)
        self.traffic = Traffic()
        stream = dial(self._listener.address, "a", Hello("", "c", 0, (LIMIT, LIMIT)), SocketOptions(), ReusedMemory())
        while (accepted := self._listener.accept()) is None:
            time.sleep(0.001)
        self.compute: TensorStream[AttentionToCompute] = TensorStream(stream, AttentionToCompute)
        self.attention: TensorStream[ComputeToAttention] = TensorStream(accepted[0], ComputeToAttention, self.traffic)

    def receive(self) -> tuple[ComputeToAttention, list[torch.Tensor], bool]:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            assert time.monotonic() < deadline
            self.compute.stream.flush()
            self.attention.stream.notice()
            if (received := self.attention.receive()) is not None:
                return received

    def close(self) -> None:
        self.compute.stream.close()
        self.attention.stream.close()
        self._listener.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


def _filled(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return (torch.arange(count) % 13).to(torch.float32).to(dtype).view(shape)


@pytest.mark.parametrize("dtype", list(WIRE_DTYPES), ids=str)
@pytest.mark.parametrize("rows", [0, 1, 7, 900], ids=lambda rows: f"{rows} rows")
def test_tensors_arrive_as_they_were(pair: Pair, dtype: torch.dtype, rows: int) -> None:
    """Of every type, small ones and large, contiguous and not."""
    strided = _filled((rows, 6, 64), dtype)[:, 1:4]
    sent = [_filled((rows, 3, 40), dtype), strided, _filled((5,), torch.float32)]
    pair.compute.send(PIECE, sent)
    message, received, _ = pair.receive()
    assert isinstance(message, m.Piece)
    for ours, theirs in zip(sent, received, strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert torch.equal(ours.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8))
    assert pair.traffic.tensor_bytes == sum(tensor.nbytes for tensor in sent)


def test_large_tensors_have_memory_of_their_own_and_small_ones_do_not(pair: Pair) -> None:
    """What was large is still there when more has come."""
    numbers = [torch.full((1 << 19,), float(number)) for number in range(4)]
    for tensor in numbers:
        pair.compute.send(PIECE, [tensor])
    received = [pair.receive() for _ in numbers]
    assert all(own for _, _, own in received)
    assert all(torch.equal(came[0], tensor) for (_, came, _), tensor in zip(received, numbers, strict=True))
    pair.compute.send(PIECE, [torch.zeros(SMALL // 8)])
    assert not pair.receive()[2]


def test_a_message_that_is_too_large_is_refused_and_the_next_goes(pair: Pair) -> None:
    with pytest.raises(WireError, match="larger than this connection takes"):
        pair.compute.send(PIECE, [torch.zeros(LIMIT)])
    pair.compute.send(m.EndStep(*FRAME, 0), [])
    assert pair.receive()[0] == m.EndStep(*FRAME, 0)


def test_memory_is_used_again_once_no_tensor_lies_in_it() -> None:
    """And not before, through whatever views it is referred to."""
    memory = ReusedMemory()
    first = memory(1000)
    address = torch.frombuffer(first, dtype=torch.uint8).data_ptr()
    assert address % 64 == 0
    tensor = torch.frombuffer(first[64:128], dtype=torch.float32)[3:]
    del first
    second = torch.frombuffer(memory(1000), dtype=torch.uint8)
    assert second.data_ptr() != address
    del tensor
    third = torch.frombuffer(memory(900), dtype=torch.uint8)
    assert third.data_ptr() == address


def test_only_so_many_blocks_are_kept() -> None:
    memory = ReusedMemory()
    held = [memory(1 << (10 + number)) for number in range(3 * MOST)]
    assert len(memory._blocks) == MOST
    assert len({torch.frombuffer(each, dtype=torch.uint8).data_ptr() for each in held}) == 3 * MOST
