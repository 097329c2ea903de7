"""What the block pool promises."""

import pytest

from pannier.scheduler import BlockPool, Inconsistent

pytestmark = pytest.mark.timeout(30)


def test_blocks_are_handed_out_once_and_come_back() -> None:
    pool = BlockPool(5)
    first, second = pool.allocate(2), pool.allocate(3)
    assert sorted([*first, *second]) == [0, 1, 2, 3, 4]
    assert (pool.free, pool.used, pool.cached, pool.total) == (0, 5, 0, 5)
    pool.release(first)
    pool.check()
    assert (pool.free, pool.used) == (2, 3)
    assert [pool.is_used(block) for block in first] == [False, False]
    assert sorted(pool.allocate(2)) == sorted(first)


def test_more_blocks_than_are_free_are_refused_and_none_is_taken() -> None:
    pool = BlockPool(5)
    pool.allocate(2)
    with pytest.raises(ValueError, match="4 blocks asked for, 3 of 5 are available"):
        pool.allocate(4)
    assert pool.free == 3
    pool.check()


def test_a_block_comes_back_once() -> None:
    pool = BlockPool(5)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(Inconsistent, match=f"block {blocks[0]} is released twice"):
        pool.release(blocks)


def test_a_pool_has_blocks() -> None:
    with pytest.raises(ValueError, match="num_blocks is 0"):
        BlockPool(0)
