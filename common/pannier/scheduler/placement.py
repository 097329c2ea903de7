"""Which attention workers form a group, and which KV heads each of them holds. Pure arithmetic.

A call's KV heads are split into contiguous ranges, one a worker, at least one head each; calls with equally many heads
are split alike. How many blocks a group has is decided by the worker that runs out first, how fast it is by the one
with the most bytes to read for its bandwidth. Wanted is the fastest of the splits that keep 90 % of the best block
count: 8 heads over 3 equal workers are 3 + 3 + 2.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, inf

from pannier.scheduler.blocks import blocks_for
from pannier.wire import Dtype
from pannier.wire.messages import CallGeometry, HeadRange

KEEP_BLOCKS = 0.9
"""Share of the best block count that a faster split must keep."""


class PlacementError(ValueError):
    """These workers can't hold this model's cache, or the split that was asked for doesn't fit."""


@dataclass(frozen=True)
class AttentionOffer:
    """What one attention worker offers: bytes for blocks, and how many bytes it reads in a second."""

    name: str
    memory_bytes: int
    bandwidth: float


@dataclass(frozen=True)
class ShardPlan:
    """The heads of each call, in graph order, that one worker holds."""

    worker: str
    heads: tuple[HeadRange, ...]


@dataclass(frozen=True)
class GroupPlan:
    """Workers that together hold every head of every call, and the blocks that each of them allocates."""

    shards: tuple[ShardPlan, ...]
    num_blocks: int


@dataclass(frozen=True)
class HeadClass:
    """Calls that have equally many KV heads; `token_bytes` are K and V of one of the heads, over all these calls."""

    kv_heads: int
    token_bytes: int


Counts = dict[int, list[int]]
"""Heads of each worker, for each number of KV heads that calls have."""


def form_groups(
    offers: Sequence[AttentionOffer],
    calls: Sequence[CallGeometry],
    *,
    block_size: int,
    kv_dtype: Dtype,
    split: str | None = None,
) -> tuple[GroupPlan, ...]:
    """Groups of all offered workers; more workers than the smallest number of KV heads form several groups.

    `kv_dtype` is what K and V are stored in. `split` ("5,3") gives the heads of each worker, in the order offered, and
    with it the size of the groups. Raises `PlacementError`.
    """
    _refuse_nonsense(offers, calls)
    classes = head_classes(calls, kv_dtype)
    if split is not None:
        wanted = parse_split(split, classes, len(offers))
        teams = [offers[first : first + len(wanted)] for first in range(0, len(offers), len(wanted))]
        return tuple(_group(team, calls, classes, dict.fromkeys(_kinds(classes), wanted), block_size) for team in teams)
    teams = form_teams(offers, min(_kinds(classes)))
    return tuple(_group(team, calls, classes, split_heads(team, classes, block_size), block_size) for team in teams)


def _refuse_nonsense(offers: Sequence[AttentionOffer], calls: Sequence[CallGeometry]) -> None:
    if not calls:
        raise PlacementError("the model has no attention calls, so there is nothing to place")
    for offer in offers:
        if offer.memory_bytes <= 0 or offer.bandwidth <= 0:
            raise PlacementError(
                f"attention worker {offer.name} offers {offer.memory_bytes} bytes at {offer.bandwidth} bytes/s; "
                "both must be positive"
            )


def head_classes(calls: Sequence[CallGeometry], kv_dtype: Dtype) -> tuple[HeadClass, ...]:
    """The calls by their number of KV heads, the heaviest heads first."""
    token_bytes: Counter[int] = Counter()
    for call in calls:
        token_bytes[call.kv_heads] += kv_dtype.stored_bytes(call.k_size) + kv_dtype.stored_bytes(call.v_size)
    return tuple(HeadClass(kv_heads, size) for kv_heads, size in token_bytes.most_common())


def form_teams(offers: Sequence[AttentionOffer], largest: int) -> list[Sequence[AttentionOffer]]:
    """The fewest teams of at most `largest` workers, of even size, like beside like: the smallest sets the pace."""
    ordered = sorted(offers, key=lambda offer: offer.memory_bytes, reverse=True)
    num_teams = blocks_for(len(ordered), largest)
    bounds = [len(ordered) * team // num_teams for team in range(num_teams + 1)] if num_teams else [0]
    return [ordered[start:stop] for start, stop in pairwise(bounds)]


def split_heads(team: Sequence[AttentionOffer], classes: Sequence[HeadClass], block_size: int) -> Counts:
    """Heads of each worker: the fastest split that keeps 90 % of the best block count."""
    memory = [float(offer.memory_bytes) for offer in team]
    roomiest = _spread(classes, memory, [inf] * len(team))
    assert roomiest is not None, "without a limit every head finds a place"
    wanted = ceil(KEEP_BLOCKS * _num_blocks(team, classes, roomiest, block_size))
    if not wanted:
        return roomiest
    limits = [offer.memory_bytes / (wanted * block_size) for offer in team]
    return _spread(classes, [offer.bandwidth for offer in team], limits) or roomiest


def parse_split(split: str, classes: Sequence[HeadClass], num_workers: int) -> list[int]:
    """The heads of each worker of a group as the user wrote them; raises `PlacementError`."""
    parts = split.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise PlacementError(f"heads split is {split!r}; it must be numbers of heads, such as 5,3")
    wanted = [int(part) for part in parts]
    for kv_heads in _kinds(classes):
        if sum(wanted) != kv_heads:
            raise PlacementError(f"heads split {split} adds up to {sum(wanted)}; the model has {kv_heads} KV heads")
    if num_workers % len(wanted):
        raise PlacementError(f"heads split {split} is for {len(wanted)} workers a group; there are {num_workers}")
    return wanted


def _spread(classes: Sequence[HeadClass], speeds: Sequence[float], limits: Sequence[float]) -> Counts | None:
    """Give each head, the heaviest first, to whoever then has the smallest bytes / speed and stays within its limit.

    For one class the largest quotient is the smallest possible, for several it is near it. None when a head finds no
    place.
    """
    workers = range(len(speeds))
    counts: Counts = {each.kv_heads: [1] * len(speeds) for each in classes}
    loads = [sum(each.token_bytes for each in classes)] * len(speeds)
    if any(loads[worker] > limits[worker] for worker in workers):
        return None
    for each in classes:
        for _ in range(each.kv_heads - len(speeds)):
            size = each.token_bytes
            open_to = [worker for worker in workers if loads[worker] + size <= limits[worker]]
            if not open_to:
                return None
            chosen = min(open_to, key=lambda worker: (loads[worker] + size) / speeds[worker])
            counts[each.kv_heads][chosen] += 1
            loads[chosen] += size
    return counts


def _group(
    team: Sequence[AttentionOffer],
    calls: Sequence[CallGeometry],
    classes: Sequence[HeadClass],
    counts: Counts,
    block_size: int,
) -> GroupPlan:
    num_blocks = _num_blocks(team, classes, counts, block_size)
    if num_blocks < 1:
        raise PlacementError(_too_small(team, classes, counts, block_size))
    ranges = {kv_heads: _ranges(shares) for kv_heads, shares in counts.items()}
    shards = (
        ShardPlan(offer.name, tuple(ranges[call.kv_heads][number] for call in calls))
        for number, offer in enumerate(team)
    )
    return GroupPlan(tuple(shards), num_blocks)


def _num_blocks(team: Sequence[AttentionOffer], classes: Sequence[HeadClass], counts: Counts, block_size: int) -> int:
    """Blocks that every worker of the team has room for."""
    return min(
        offer.memory_bytes // (_token_bytes(classes, counts, number) * block_size) for number, offer in enumerate(team)
    )


def _token_bytes(classes: Sequence[HeadClass], counts: Counts, worker: int) -> int:
    return sum(each.token_bytes * counts[each.kv_heads][worker] for each in classes)


def _too_small(team: Sequence[AttentionOffer], classes: Sequence[HeadClass], counts: Counts, block_size: int) -> str:
    """What each worker has, and what the model takes of it."""
    lines = [
        f"these attention workers can't hold one block of {block_size} tokens; give them more memory, add workers "
        "(each then holds fewer heads), or choose a smaller block size or KV dtype:",
        "worker  memory bytes  KV bytes per token  blocks  longest",
    ]
    for number, offer in enumerate(team):
        per_token = _token_bytes(classes, counts, number)
        num_blocks = offer.memory_bytes // (per_token * block_size)
        lines.append(
            f"{offer.name}  {offer.memory_bytes:>12}  {per_token:>18}  {num_blocks:>6}  {num_blocks * block_size:>7}"
        )
    return "\n".join(lines)


def _ranges(shares: Sequence[int]) -> list[HeadRange]:
    bounds = [sum(shares[:number]) for number in range(len(shares) + 1)]
    return [HeadRange(start, stop) for start, stop in pairwise(bounds)]


def _kinds(classes: Sequence[HeadClass]) -> list[int]:
    return [each.kv_heads for each in classes]
