"""The memory that holds keys and values: blocks of a fixed number of tokens, numbered by whoever owns the tables."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from pannier.ops.huge_pages import ask_for_huge_pages
from pannier.ops.quantise import SCALE, is_scaled


@dataclass(frozen=True)
class CallShape:
    """What one attention call stores per token: `kv_heads` keys of `k_size` and values of `v_size` elements."""

    kv_heads: int
    k_size: int
    v_size: int

    def __post_init__(self) -> None:
        for field in ("kv_heads", "k_size", "v_size"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} is {getattr(self, field)}; it must be at least 1")

    @property
    def token_elements(self) -> int:
        """Elements that one token takes."""
        return self.kv_heads * (self.k_size + self.v_size)

    def token_bytes(self, dtype: torch.dtype) -> int:
        """Bytes that one token takes, scales included."""
        scales = 2 * self.kv_heads * SCALE.itemsize if is_scaled(dtype) else 0
        return self.token_elements * dtype.itemsize + scales


def block_bytes(shapes: Sequence[CallShape], block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one block takes over all calls."""
    return sum(shape.token_bytes(dtype) for shape in shapes) * block_size


class KVCache:
    """Keys and values of all calls, laid out [block, KV head, token, size]; one block number means all calls.

    In 8 bits there is a scale for each token's key and value of a head beside them; see `pannier.ops.quantise`.

    The memory is written once at the start, so that a machine without enough of it fails here and not in a step.
    """

    def __init__(
        self,
        shapes: Sequence[CallShape],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks is {num_blocks}, block_size {block_size}; both must be at least 1")
        self.shapes = tuple(shapes)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.device = torch.device(device)
        self._keys = [self._allocate(shape.kv_heads, shape.k_size) for shape in self.shapes]
        self._values = [self._allocate(shape.kv_heads, shape.v_size) for shape in self.shapes]
        self._scales = [self._allocate_scales(shape.kv_heads) for shape in self.shapes if is_scaled(dtype)]

    def _allocate(self, heads: int, *size: int, dtype: torch.dtype | None = None) -> Tensor:
        shape = (self.num_blocks, heads, self.block_size, *size)
        stored = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        if self.device.type == "cpu":
            ask_for_huge_pages(stored)
        return stored.zero_()

    def _allocate_scales(self, heads: int) -> tuple[Tensor, Tensor]:
        return self._allocate(heads, dtype=SCALE), self._allocate(heads, dtype=SCALE)

    def keys(self, call: int) -> Tensor:
        """Keys of a call, [P, G, K, Dk]."""
        return self._keys[call]

    def values(self, call: int) -> Tensor:
        """Values of a call, [P, G, K, Dv]."""
        return self._values[call]

    def scales(self, call: int) -> tuple[Tensor, Tensor] | None:
        """Scales of the keys and of the values of a call, each [P, G, K] in fp32; None where the dtype has none."""
        return self._scales[call] if self._scales else None

    @property
    def tensors(self) -> list[Tensor]:
        """Keys and values of all calls."""
        return [*self._keys, *self._values]

    @property
    def num_bytes(self) -> int:
        """Bytes that the whole cache takes."""
        return self.num_blocks * block_bytes(self.shapes, self.block_size, self.dtype)

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int], calls: slice = slice(None)) -> None:
        """Copy whole blocks, in every call or in some of them. All sources are read before any target is written.

        Raises ValueError when the lists differ in length, a target occurs twice or a number is no block.
        """
        self._check_copies(sources, targets)
        if not sources:
            return
        read = torch.tensor(list(sources), dtype=torch.int64, device=self.device)
        write = torch.tensor(list(targets), dtype=torch.int64, device=self.device)
        for stored in (*self._keys[calls], *self._values[calls], *chain.from_iterable(self._scales[calls])):
            elements = stored.view(torch.int8) if stored.itemsize == 1 else stored  # torch doesn't index fp8
            elements.index_copy_(0, write, elements.index_select(0, read))

    def _check_copies(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        if len(sources) != len(targets):
            raise ValueError(f"{len(sources)} source blocks for {len(targets)} target blocks; there must be as many")
        if len(set(targets)) != len(targets):
            raise ValueError(f"target blocks {list(targets)} name one twice; each may be written once")
        for block in (*sources, *targets):
            if not 0 <= block < self.num_blocks:
                raise ValueError(f"block {block} does not exist; blocks are 0 to {self.num_blocks - 1}")
