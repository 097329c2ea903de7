"""What sees everything: which blocks are free, and whether what is read and written is still the reader's."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from pannier.ops.kv_cache import CallShape, KVCache
from pannier.scheduler import BlockPool
from pannier.wire import messages as m

from .violation import Violation

Block = tuple[int, int]  # group, number


class Watch:
    """Epochs of blocks: a block's epoch grows when the scheduler frees it, in the same moment it is filled with NaN."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._epochs: Counter[Block] = Counter()
        self._caches: dict[int, list[WatchedCache]] = defaultdict(list)
        self._steps: dict[int, dict[Block, int]] = {}
        self._pools: dict[int, BlockPool] = {}

    def follow(self, pools: dict[int, BlockPool]) -> None:
        """Learn from now on what new pools free."""
        for group, pool in pools.items():
            if group not in self._pools:
                self._pools[group] = pool
                self._listen(group, pool)

    def _listen(self, group: int, pool: BlockPool) -> None:
        """A block's content ends when it becomes free, or when it was kept for its content and is handed out anew."""
        release, take = pool.release, pool._take

        def release_and_spoil(blocks: Sequence[int]) -> None:
            release(blocks)
            self._freed(group, [block for block in blocks if block in set(pool._free[-len(blocks) :])])

        def take_and_spoil() -> int:
            was_cached = not pool.free
            block = take()
            if was_cached:
                self._freed(group, [block])
            return block

        pool.release = release_and_spoil  # type: ignore[method-assign]  # the scheduler makes its own pools
        pool._take = take_and_spoil  # type: ignore[method-assign]

    def _freed(self, group: int, blocks: Sequence[int]) -> None:
        if not blocks:
            return
        self.counts["blocks freed"] += len(blocks)
        self._epochs.update((group, block) for block in blocks)
        for cache in self._caches[group]:
            cache.spoil(blocks)

    def has_cache(self, group: int, cache: "WatchedCache") -> None:
        """An attention worker has allocated its blocks."""
        self._caches[group].append(cache)

    def planned(self, step: m.Step, tables: Sequence[int]) -> None:
        """The gateway has sent a step: these are the blocks that it may use, as they are now."""
        self.counts["steps"] += 1
        blocks = {
            (segment.group, block)
            for segment in step.segments
            for block in tables[segment.first_block : segment.first_block + segment.num_blocks]
        }
        self._steps[step.step] = {block: self._epochs[block] for block in blocks}

    def used(self, group: int, step: int) -> None:
        """An attention worker of the group has read or written for the step. Raises `Violation` if it came too late."""
        late = self._freed_since(group, step)
        if late:
            raise Violation(f"step {step} used blocks {late} of group {group}, which were freed before")

    def refused(self, group: int | None, message: Any) -> None:
        """An attention worker has dropped a frame as stale."""
        self.counts["stale frames"] += 1
        if isinstance(message, m.Piece) and group is not None and self._freed_since(group, message.step):
            self.counts["late writes refused"] += 1

    def _freed_since(self, group: int, step: int) -> list[int]:
        epochs = self._steps.get(step, {})
        return [block for (of, block), epoch in epochs.items() if of == group and self._epochs[of, block] != epoch]

    def check_free_blocks(self) -> None:
        """Raise `Violation` if something was written into a free block."""
        for group, caches in self._caches.items():
            pool = self._pools.get(group)
            free = list(pool._free) if pool is not None else []
            for cache in caches:
                cache.check_spoiled(free)


class WatchedCache(KVCache):
    """A cache whose unwritten and freed blocks hold NaN, and that can be made to run out of memory."""

    def __init__(
        self,
        shapes: Sequence[CallShape],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__(shapes, num_blocks, block_size, dtype, device)
        self.fails_next = False
        self.spoil(range(num_blocks))

    def keys(self, call: int) -> torch.Tensor:
        """As the cache's own, or out of memory if that was ordered."""
        if self.fails_next:
            self.fails_next = False
            raise torch.OutOfMemoryError("as ordered")
        return super().keys(call)

    def spoil(self, blocks: Sequence[int]) -> None:
        """Fill blocks with NaN."""
        for stored in self._stored():
            stored[list(blocks)] = torch.nan

    def check_spoiled(self, blocks: Sequence[int]) -> None:
        """Raise `Violation` if one of the blocks holds a number."""
        if not all(bool(stored[list(blocks)].isnan().all()) for stored in self._stored()):
            raise Violation(f"one of the free blocks {list(blocks)} was written")

    def _stored(self) -> list[torch.Tensor]:
        calls = range(len(self.shapes))
        return [super(WatchedCache, self).keys(call) for call in calls] + [self.values(call) for call in calls]
