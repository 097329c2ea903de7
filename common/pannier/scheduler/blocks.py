"""The block numbers of one group: which are free and which are in use. Knows numbers only, never tensors."""

from array import array
from collections.abc import Iterable
from typing import TypeAlias

Ints: TypeAlias = "array[int]"
"""Token ids, block numbers: int32 as they go on the wire (`array` can't be subscripted at run time before 3.12)."""


class Inconsistent(RuntimeError):
    """The books don't balance: a bug in the scheduler, never a caller's mistake."""


def require(condition: bool, message: str) -> None:
    """Raise `Inconsistent` with `message` unless `condition` holds (an assert that -O keeps)."""
    if not condition:
        raise Inconsistent(message)


def blocks_for(num_tokens: int, block_size: int) -> int:
    """How many blocks hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)


class BlockPool:
    """Hands out the blocks 0 to `num_blocks` - 1 of one group; always free + used + cached == total."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}; a pool has at least 1 block")
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: a block just read is the one still in caches
        self._is_used = bytearray(num_blocks)

    @property
    def total(self) -> int:
        """All blocks."""
        return len(self._is_used)

    @property
    def free(self) -> int:
        """Blocks that `allocate` can hand out."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Blocks that some sequence holds."""
        return self.total - self._is_used.count(0)

    @property
    def cached(self) -> int:
        """Unheld blocks kept for their content. A pool without a prefix cache keeps none."""
        return 0

    def is_used(self, block: int) -> bool:
        """Whether some sequence holds `block`."""
        return bool(self._is_used[block])

    def allocate(self, count: int) -> Ints:
        """Take `count` blocks; raises `ValueError` when fewer are free (ask `free` first)."""
        if count > self.free:
            raise ValueError(f"{count} blocks asked for, {self.free} of {self.total} are free")
        taken = array("i", (self._free.pop() for _ in range(count)))
        for block in taken:
            self._is_used[block] = 1
        return taken

    def release(self, blocks: Iterable[int]) -> None:
        """Give blocks back; raises `Inconsistent` when one is not in use."""
        for block in blocks:
            require(self.is_used(block), f"block {block} is released twice")
            self._is_used[block] = 0
            self._free.append(block)

    def check(self) -> None:
        """Raise `Inconsistent` unless every block is either free, once, or used."""
        require(self.free + self.used + self.cached == self.total, f"{self.free} + {self.used} of {self.total} blocks")
        require(len(set(self._free)) == self.free, "a block is free twice")
        require(not any(self._is_used[block] for block in self._free), "a block is free and in use")
