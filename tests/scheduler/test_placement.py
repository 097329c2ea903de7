"""What placement promises: every head once, the best splits, and clear words when it can't."""

from itertools import combinations, pairwise
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pannier.scheduler import AttentionOffer, GroupPlan, PlacementError, form_groups
from pannier.wire import Dtype
from pannier.wire.messages import CallGeometry

pytestmark = pytest.mark.timeout(30)

MIB = 1 << 20
BLOCK_SIZE = 16


def call(kv_heads: int, k_size: int = 64, v_size: int = 64) -> CallGeometry:
    return CallGeometry(2 * kv_heads, kv_heads, k_size, v_size, 1.0, 0, 0.0)


def offers(*memory: int, bandwidth: float = 1e9) -> list[AttentionOffer]:
    return [AttentionOffer(f"w{number}", each, bandwidth) for number, each in enumerate(memory)]


def place(workers: list[AttentionOffer], calls: list[CallGeometry], split: str | None = None) -> tuple[GroupPlan, ...]:
    return form_groups(workers, calls, block_size=BLOCK_SIZE, kv_dtype=Dtype.BFLOAT16, split=split)


def sizes(plan: GroupPlan, of_call: int = 0) -> list[int]:
    return [shard.heads[of_call].stop - shard.heads[of_call].start for shard in plan.shards]


def test_eight_heads_over_three_equal_workers_are_three_three_two() -> None:
    (plan,) = place(offers(MIB, MIB, MIB), [call(8)] * 4)
    assert sizes(plan) == [3, 3, 2]
    assert plan.num_blocks == MIB // (3 * (64 + 64) * 2 * 4 * BLOCK_SIZE)


def test_one_worker_holds_all_heads() -> None:
    (plan,) = place(offers(MIB), [call(8), call(4)])
    assert [(heads.start, heads.stop) for heads in plan.shards[0].heads] == [(0, 8), (0, 4)]


def test_heads_follow_memory_when_blocks_would_be_lost() -> None:
    (plan,) = place(offers(6 * MIB, 2 * MIB), [call(8)])
    assert sizes(plan) == [6, 2]


def test_heads_follow_bandwidth_as_long_as_blocks_allow() -> None:
    workers = [AttentionOffer("fast", 100 * MIB, 3e9), AttentionOffer("slow", 100 * MIB, 1e9)]
    (plan,) = place(workers, [call(20)])
    assert sizes(plan) == [11, 9], "12 + 8 would be faster, but leave less than 90 % of the blocks"


@pytest.mark.parametrize("measured", [0.8, 1.0, 1.25])
def test_half_a_worker_gets_fewer_heads_also_when_its_bandwidth_is_measured_badly(measured: float) -> None:
    """Half the memory, half the bandwidth: the slowest reads three quarters of what it would of an even split.

    And the group has room for a third more.
    """
    workers = [AttentionOffer("whole", 30 * MIB, 2e9), AttentionOffer("half", 15 * MIB, measured * 1e9)]
    (plan,), (even,) = place(workers, [call(8)] * 4), place(workers, [call(8)] * 4, split="4,4")
    whole, half = sizes(plan)
    assert max(whole / 2, half) == 3 / 4 * 4
    assert plan.num_blocks >= 1.3 * even.num_blocks


def test_more_workers_than_heads_form_several_groups_of_like_workers() -> None:
    plans = place(offers(MIB, 3 * MIB, MIB, 3 * MIB, MIB), [call(8), call(2)])
    assert [[shard.worker for shard in plan.shards] for plan in plans] == [["w1"], ["w3", "w0"], ["w2", "w4"]]


def test_a_single_kv_head_is_never_shared() -> None:
    plans = place(offers(MIB, MIB, MIB), [call(1)])
    assert [sizes(plan) for plan in plans] == [[1], [1], [1]]


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    memory=st.lists(st.integers(1, 64), min_size=1, max_size=9),
    kv_heads=st.lists(st.integers(1, 16), min_size=1, max_size=3),
)
def test_every_head_of_every_call_is_in_exactly_one_shard(memory: list[int], kv_heads: list[int]) -> None:
    calls = [call(each) for each in kv_heads]
    plans = place(offers(*(each * MIB for each in memory)), calls)
    assert sorted(shard.worker for plan in plans for shard in plan.shards) == [f"w{n}" for n in range(len(memory))]
    for plan in plans:
        for number, each in enumerate(calls):
            ranges = [shard.heads[number] for shard in plan.shards]
            assert ranges[0].start == 0
            assert ranges[-1].stop == each.kv_heads
            assert all(left.stop == right.start for left, right in pairwise(ranges))
            assert all(heads.start < heads.stop for heads in ranges)
        for shard in plan.shards:
            heads = sum(each.stop - each.start for each in shard.heads)
            assert plan.num_blocks * heads * (64 + 64) * 2 * BLOCK_SIZE <= memory[int(shard.worker[1:])] * MIB


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    workers=st.lists(st.tuples(st.integers(20, 200), st.sampled_from([1.0, 2.0, 3.5])), min_size=1, max_size=4),
    kv_heads=st.integers(4, 10),
)
def test_the_split_is_the_fastest_of_those_that_keep_the_blocks(
    workers: list[tuple[int, float]], kv_heads: int
) -> None:
    """Against all splits there are."""
    head_bytes = (64 + 64) * 2 * BLOCK_SIZE
    team = [AttentionOffer(f"w{n}", memory * head_bytes, speed) for n, (memory, speed) in enumerate(workers)]
    (plan,) = place(team, [call(kv_heads)])
    by_name = {offer.name: offer for offer in team}
    team = [by_name[shard.worker] for shard in plan.shards]

    def blocks(split: list[int]) -> int:
        return min(offer.memory_bytes // (heads * head_bytes) for offer, heads in zip(team, split, strict=True))

    def slowness(split: list[int]) -> float:
        return max(heads / offer.bandwidth for offer, heads in zip(team, split, strict=True))

    cuts = combinations(range(1, kv_heads), len(team) - 1)
    splits = [[stop - start for start, stop in pairwise((0, *cut, kv_heads))] for cut in cuts]
    enough = ceil(0.9 * max(map(blocks, splits)))
    assert plan.num_blocks == blocks(sizes(plan)) >= enough
    assert slowness(sizes(plan)) == min(slowness(split) for split in splits if blocks(split) >= enough)


def test_the_split_can_be_given_in_the_order_of_the_workers() -> None:
    plans = place(offers(MIB, 2 * MIB, MIB, MIB), [call(8)], split="5,3")
    assert [sizes(plan) for plan in plans] == [[5, 3], [5, 3]]
    assert [[shard.worker for shard in plan.shards] for plan in plans] == [["w0", "w1"], ["w2", "w3"]]


@pytest.mark.parametrize(
    ("split", "reason"),
    [
        ("5,x", "heads split is '5,x'; it must be numbers of heads"),
        ("8,0", "heads split is '8,0'; it must be numbers of heads"),
        ("5,4", "heads split 5,4 adds up to 9; the model has 8 KV heads"),
        ("5,2,1", "heads split 5,2,1 is for 3 workers a group; there are 2"),
    ],
)
def test_a_split_that_does_not_fit_is_refused(split: str, reason: str) -> None:
    with pytest.raises(PlacementError, match=reason):
        place(offers(MIB, MIB), [call(8)], split=split)


def test_workers_too_small_for_one_block_are_refused_with_what_they_have_and_need() -> None:
    with pytest.raises(PlacementError, match="one block of 16 tokens; give them more memory") as caught:
        place(offers(MIB, 1000), [call(4)])
    assert [line.split() for line in str(caught.value).splitlines()[2:]] == [
        ["w0", "1048576", "768", "85", "1360"],
        ["w1", "1000", "256", "0", "0"],
    ]


def test_what_has_nothing_to_place_or_nowhere_to_place_it_is_refused() -> None:
    with pytest.raises(PlacementError, match="no attention calls"):
        place(offers(MIB), [])
    with pytest.raises(PlacementError, match="both must be positive"):
        place(offers(0), [call(4)])
    assert place([], [call(4)]) == ()
