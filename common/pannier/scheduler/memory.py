"""Which blocks a sequence holds, in which group: the block pools of all groups, and every way to take and give."""

from array import array
from collections.abc import Iterator
from collections.abc import Sequence as List

from pannier.scheduler.admission import blocks_to_start, fits
from pannier.scheduler.blocks import BlockPool, Ints, blocks_for
from pannier.scheduler.config import SchedulerConfig
from pannier.scheduler.sequence import Part, Sequence

KEPT_BACK = 100
"""One block in so many is not given to newcomers while others run: they would be preempted at once."""


class Memory:
    """The blocks of every group, and who holds them."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.pools: dict[int, BlockPool] = {}
        self.lost_groups: set[int] = set()
        self._config = config
        self._block_size = config.block_size

    def add_group(self, group: int, num_blocks: int) -> None:
        """Blocks of a new group. A group's number is never used again."""
        if group in self.pools or group in self.lost_groups:
            raise ValueError(f"group {group} exists or existed; a new group needs a new number")
        self.pools[group] = BlockPool(num_blocks)

    def lose_group(self, group: int) -> None:
        """K and V of a group are lost."""
        del self.pools[group]
        self.lost_groups.add(group)

    def group_of(self, sequence: Sequence) -> int:
        """The group of its last block."""
        assert sequence.group is not None, f"sequence {sequence.number} has no group"
        return sequence.group

    def could_hold(self, sequence: Sequence) -> bool:
        """Whether the groups have, empty, enough blocks for all that the sequence may become."""
        return fits(sequence.request, sequence.max_stored, self.pools, self._block_size)

    def place(self, sequence: Sequence) -> bool:
        """Give the sequence a group and blocks for what it is so far; False when none has enough.

        Chosen is where most blocks are left then, those counted that hold what it needs already. One that is too long
        for any group, even an empty one, is spread over several.
        """
        needed = self._blocks_to_start(sequence)
        if needed > max(pool.total for pool in self.pools.values()):
            return self._spread(sequence, needed)
        best: tuple[int, int, Ints] | None = None
        for group, pool in self.pools.items():
            found = pool.match(self._known_contents(sequence))
            left = pool.available - pool.num_cached_among(found) - (needed - len(found))
            kept_back = -(-pool.total // KEPT_BACK) if pool.used else 0
            if left >= kept_back and (best is None or left + len(found) > best[0]):
                best = left + len(found), group, found
        if best is None:
            return False
        _, sequence.group, found = best
        pool = self.pools[sequence.group]
        pool.hold(found)
        sequence.blocks = found + pool.allocate(blocks_for(sequence.length, self._block_size) - len(found))
        sequence.spare = pool.allocate(needed - len(sequence.blocks))
        stored = sequence.num_prompt - 1 if self._config.assume_stored else len(found) * self._block_size
        sequence.num_stored = sequence.num_planned = stored
        return True

    def _spread(self, sequence: Sequence, needed: int) -> bool:
        """The fewest groups that have room now, the roomiest first."""
        if needed > sum(pool.available for pool in self.pools.values()):
            return False
        parts: list[Part] = []
        for group in sorted(self.pools, key=lambda group: -self.pools[group].available):
            pool, start = self.pools[group], len(sequence.blocks)
            count = min(pool.available, needed - start)
            if count:
                parts.append(Part(group, start))
                sequence.blocks.extend(pool.allocate(count))
        sequence.parts, sequence.group = tuple(parts), parts[-1].group
        return True

    def grow(self, sequence: Sequence) -> bool:
        """One more block; False when its group has none."""
        pool = self.pools[self.group_of(sequence)]
        if not pool.available:
            return False
        sequence.blocks.extend(pool.allocate(1))
        return True

    def grow_elsewhere(self, sequence: Sequence) -> bool:
        """One more block of another group, for a sequence that no group could hold alone; False when there is none."""
        needed = len(sequence.blocks) + 1
        roomiest = max(self.pools, key=lambda group: self.pools[group].available)
        if needed <= max(pool.total for pool in self.pools.values()) or not self.pools[roomiest].available:
            return False
        parts = sequence.parts or (Part(self.group_of(sequence), 0),)
        sequence.parts, sequence.group = (*parts, Part(roomiest, len(sequence.blocks))), roomiest
        return self.grow(sequence)

    def share(self, parent: Sequence, child: Sequence) -> None:
        """Give the child the prompt's full blocks, and one of its own for a copy of the last that isn't full."""
        child.group = self.group_of(parent)
        pool = self.pools[child.group]
        num_full, tail = divmod(parent.num_prompt, self._block_size)
        child.blocks = parent.blocks[:num_full]
        pool.hold(child.blocks)
        if tail:
            child.copied = parent.blocks[num_full]
            pool.hold([child.copied])
            child.blocks.append(parent.spare.pop())
        child.num_stored = child.num_planned = parent.num_prompt

    def filled(self, sequence: Sequence, before: int) -> None:
        """Where it had stored `before` tokens it now has more: blocks that are full can be found by their content."""
        if sequence.copied is not None and sequence.num_stored > before:
            self._give(self.group_of(sequence), [sequence.copied])
            sequence.copied = None
        if not self._config.prefix_cache:
            return
        known = min(sequence.num_stored, len(sequence.tokens))  # rows planned ahead may lie behind its end
        full = range(before // self._block_size, known // self._block_size)
        for group, start, stop in sequence.ranges:
            for index in range(max(full.start, start), min(full.stop, stop)):
                name = sequence.contents.name(index, sequence.tokens, self._block_size)
                if group in self.pools:
                    self.pools[group].publish(sequence.blocks[index], name)

    def release_spare(self, sequence: Sequence) -> None:
        """Give back what was kept for further samples."""
        self._give(self.group_of(sequence), sequence.spare)
        sequence.spare = array("i")

    def release(self, sequence: Sequence) -> None:
        """Give back all that a sequence holds."""
        for group, start, stop in reversed(sequence.ranges):
            self._give(group, sequence.blocks[start:stop])
        if sequence.group is not None:
            self._give(sequence.group, sequence.spare)
            self._give(sequence.group, [] if sequence.copied is None else [sequence.copied])

    def _give(self, group: int, blocks: List[int]) -> None:
        """Give blocks back, unless their group was lost."""
        if group in self.pools:
            self.pools[group].release(blocks)

    def _blocks_to_start(self, sequence: Sequence) -> int:
        if sequence.width == 1:
            return blocks_for(sequence.length, self._block_size)
        return blocks_to_start(sequence.request, sequence.length, self._block_size)

    def _known_contents(self, sequence: Sequence) -> Iterator[bytes]:
        """Names of the full blocks that it might find: not its last token, whose row must run to draw the next."""
        if self._config.prefix_cache and not sequence.wants_scores:
            for index in range((sequence.length - 1) // self._block_size):
                yield sequence.contents.name(index, sequence.tokens, self._block_size)
