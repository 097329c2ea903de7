"""The cache holds what the shapes say, and copies whole blocks of every call."""

import pytest
import torch

from pannier.ops import CallShape, KVCache, block_bytes
from pannier.wire.tensors import TORCH_DTYPES

pytestmark = pytest.mark.timeout(30)
SHAPES = (CallShape(2, 16, 8), CallShape(1, 5, 96))


def _cache() -> KVCache:
    cache = KVCache(SHAPES, num_blocks=4, block_size=8, dtype=torch.bfloat16, device="cpu")
    for call in range(len(SHAPES)):
        for stored in (cache.keys(call), cache.values(call)):
            stored.copy_(torch.arange(4).view(4, 1, 1, 1).expand(stored.shape))
    return cache


def test_calls_have_their_own_heads_and_sizes() -> None:
    """Layout is [block, KV head, token, size] for each call."""
    cache = _cache()
    assert cache.keys(0).shape == (4, 2, 8, 16)
    assert cache.values(0).shape == (4, 2, 8, 8)
    assert cache.keys(1).shape == (4, 1, 8, 5)
    assert cache.values(1).shape == (4, 1, 8, 96)


def test_block_bytes_count_every_call() -> None:
    """Bytes per block times blocks are the bytes that the tensors take."""
    cache = _cache()
    held = sum(t.numel() * t.element_size() for call in (0, 1) for t in (cache.keys(call), cache.values(call)))
    assert cache.num_bytes == held == 4 * block_bytes(SHAPES, 8, torch.bfloat16)


def test_copies_read_everything_before_they_write() -> None:
    """A block may be source and target of one list; every call is copied."""
    cache = _cache()
    cache.copy_blocks([1, 2], [2, 3])
    for call in (0, 1):
        for stored in (cache.keys(call), cache.values(call)):
            assert stored[:, 0, 0, 0].tolist() == [0, 1, 1, 2]


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_eight_bits_have_scales_that_are_counted_and_copied(dtype: torch.dtype) -> None:
    """One for the key and one for the value of each token and head."""
    cache = KVCache(SHAPES, num_blocks=4, block_size=8, dtype=dtype, device="cpu")
    held = 0
    for call, shape in enumerate(SHAPES):
        scales = cache.scales(call)
        assert scales is not None
        for stored in scales:
            assert stored.shape == (4, shape.kv_heads, 8)
            stored.copy_(torch.arange(4).view(4, 1, 1).expand(stored.shape))
        held += sum(t.numel() * t.element_size() for t in (cache.keys(call), cache.values(call), *scales))
    assert cache.num_bytes == held == 4 * block_bytes(SHAPES, 8, dtype)
    cache.copy_blocks([1, 2], [2, 3], slice(1, 2))
    for call, expected in ((0, [0, 1, 2, 3]), (1, [0, 1, 1, 2])):
        for stored in cache.scales(call) or ():
            assert stored[:, 0, 0].tolist() == expected


def test_the_gateway_counts_the_same_bytes() -> None:
    """It knows element types by their names on the wire."""
    for name, dtype in TORCH_DTYPES.items():
        if dtype.is_floating_point or dtype == torch.int8:
            for shape in SHAPES:
                head = name.stored_bytes(shape.k_size) + name.stored_bytes(shape.v_size)
                assert shape.token_bytes(dtype) == shape.kv_heads * head


def test_other_types_have_no_scales() -> None:
    assert _cache().scales(0) is None


@pytest.mark.parametrize(
    ("sources", "targets", "message"),
    [
        ([1], [4], "block 4 does not exist; blocks are 0 to 3"),
        ([-1], [0], "block -1 does not exist"),
        ([1, 2], [0], "2 source blocks for 1 target blocks"),
        ([1, 2], [0, 0], "name one twice"),
    ],
)
def test_copies_that_can_not_be_are_refused(sources: list[int], targets: list[int], message: str) -> None:
    """Nothing is copied when one pair is wrong."""
    cache = _cache()
    with pytest.raises(ValueError, match=message):
        cache.copy_blocks(sources, targets)
    assert cache.keys(0)[:, 0, 0, 0].tolist() == [0, 1, 2, 3]
