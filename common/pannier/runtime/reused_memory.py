"""Memory for large frames, used again once no tensor lies in it any more.

The system hands out fresh memory page by page, each of them zeroed when it is first written: for a frame of 1 MB that
takes as long as receiving it.
"""

import sys
from typing import Any

import torch

MOST = 4
"""Blocks that are kept: of each lane's answer one is in use."""
UNUSED = 3
"""References to a block in which nothing lies: from the list, and from two variables that look at it."""


class ReusedMemory:
    """Gives out memory at multiples of 64 bytes; whoever refers to it keeps it."""

    def __init__(self) -> None:
        self._blocks: list[Any] = []
        """NumPy arrays, since those know how many refer to them: every view of one, through any number of slices."""

    def __call__(self, size: int) -> memoryview:
        """So many bytes, with whatever is in them."""
        for block in self._blocks:
            if len(block) >= size and sys.getrefcount(block) == UNUSED:
                break
        else:
            block = torch.empty(size, dtype=torch.uint8).numpy()  # which torch aligns
            self._blocks = [block, *self._blocks[: MOST - 1]]
        memory: memoryview = block.data[:size]
        return memory
