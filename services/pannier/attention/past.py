"""A cache that starts full of random numbers, for a past that nobody computed: only times mean anything."""

from collections.abc import Sequence

import torch

from pannier.ops.kv_cache import CallShape, KVCache

DRAWN = 1 << 20
"""Numbers that are drawn; the rest repeats them, for drawing all would take minutes."""


class DrawnCache(KVCache):
    """Blocks of standard normal numbers, as keys and values about are."""

    def __init__(
        self,
        shapes: Sequence[CallShape],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__(shapes, num_blocks, block_size, dtype, device)
        drawn = torch.randn(DRAWN, generator=torch.Generator().manual_seed(0)).to(self.device, dtype)
        for call in range(len(self.shapes)):
            for stored in (self.keys(call), self.values(call)):
                for part in stored.view(-1).split(DRAWN):
                    part.copy_(drawn[: part.numel()])
            for scales in self.scales(call) or ():
                scales.fill_(1.0)
