"""The block numbers of one group: which are free, in use, or kept for their content. Knows numbers, never tensors.

A block in use has holders: the sequences whose tables name it, several when they share a prefix. One whose content is
known (full, and written by committed steps) is found by its content; when its last holder lets go it is cached, and
the block that was let go longest ago is the first to be given away.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as List
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
        self._holders = array("i", bytes(4 * num_blocks))
        self._content: dict[int, bytes] = {}
        self._by_content: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # from the one let go first to the last

    @property
    def total(self) -> int:
        """All blocks."""
        return len(self._holders)

    @property
    def free(self) -> int:
        """Blocks without holder and content."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Blocks without holder, kept for their content until they are needed."""
        return len(self._cached)

    @property
    def available(self) -> int:
        """Blocks that `allocate` can hand out."""
        return len(self._free) + len(self._cached)

    @property
    def used(self) -> int:
        """Blocks that some sequence holds."""
        return self.total - self.available

    def is_used(self, block: int) -> bool:
        """Whether some sequence holds `block`."""
        return self._holders[block] > 0

    def num_holders(self, block: int) -> int:
        """How many sequences hold `block`."""
        return self._holders[block]

    def allocate(self, count: int) -> Ints:
        """Take `count` blocks; raises `ValueError` when fewer are available (ask first)."""
        if count > self.available:
            raise ValueError(f"{count} blocks asked for, {self.available} of {self.total} are available")
        return array("i", [self._take() for _ in range(count)])

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            del self._by_content[self._content.pop(block)]
        self._holders[block] = 1
        return block

    def match(self, contents: Iterable[bytes]) -> Ints:
        """The blocks that hold these contents, up to the first that none holds."""
        found = array("i")
        for content in contents:
            block = self._by_content.get(content)
            if block is None:
                break
            found.append(block)
        return found

    def num_cached_among(self, blocks: List[int]) -> int:
        """How many of `blocks` nobody holds: to hold them makes fewer available."""
        return sum(self._holders[block] == 0 for block in blocks)

    def hold(self, blocks: Iterable[int]) -> None:
        """One more holder for each of these blocks, which are in use or cached."""
        for block in blocks:
            if self._holders[block] == 0:
                require(block in self._cached, f"block {block} is held for its content, and has none")
                del self._cached[block]
            self._holders[block] += 1

    def publish(self, block: int, content: bytes) -> None:
        """From now on `block`, in use and full, can be found by its content. The first of equal ones is the one."""
        require(self.is_used(block), f"block {block} is published and not in use")
        if block not in self._content and content not in self._by_content:
            self._content[block] = content
            self._by_content[content] = block

    def release(self, blocks: List[int]) -> None:
        """One holder less for each; raises `Inconsistent` when one has none.

        The last goes first: of a prefix that nobody holds, the end must be given away before what it stands on.
        """
        for block in reversed(blocks):
            require(self._holders[block] > 0, f"block {block} is released twice")
            self._holders[block] -= 1
            if self._holders[block] == 0:
                if block in self._content:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def check(self) -> None:
        """Raise `Inconsistent` unless every block is either free, once, or cached, or used."""
        used = sum(holders > 0 for holders in self._holders)
        require(self.free + used + self.cached == self.total, f"{self.free} + {used} + {self.cached} of {self.total}")
        require(len(set(self._free)) == self.free, "a block is free twice")
        require(not any(self._holders[block] for block in (*self._free, *self._cached)), "a block is idle and in use")
        require(all(block in self._content for block in self._cached), "a cached block has no content")
        require(not any(block in self._content for block in self._free), "a free block has content")
        require({c: b for b, c in self._content.items()} == self._by_content, "contents and blocks differ")
