"""One shard: the KV cache of some heads, and what a step does to it."""

import time
from collections.abc import Callable, Sequence

import torch

from pannier.ops.kv_cache import CallShape, KVCache
from pannier.ops.paged_attention import PagedBatch, PagedSegment, Scratch, paged_attention
from pannier.ops.store_kv import store_kv
from pannier.wire import WireError
from pannier.wire import messages as m
from pannier.wire.tensors import TORCH_DTYPES

MakeCache = Callable[..., KVCache]


class Shard:
    """The blocks of this worker's heads of every call, allocated once for the life of its group."""

    def __init__(self, assign: m.AttentionAssign, device: torch.device, make_cache: MakeCache = KVCache) -> None:
        self.assign = assign
        self.device = device
        self.wire_dtype = TORCH_DTYPES[assign.wire_dtype]
        self.converts = assign.kv_dtype is not assign.wire_dtype and not assign.kv_dtype.has_scales
        """Whether what comes is stored in another type, and met by q in it. That is what 8 bits are for."""
        self.scratch = Scratch()
        shapes = [
            CallShape(heads.stop - heads.start, call.k_size, call.v_size)
            for call, heads in zip(assign.calls, assign.heads, strict=True)
        ]
        self.cache = make_cache(shapes, assign.num_blocks, assign.block_size, TORCH_DTYPES[assign.kv_dtype], device)

    def begin(self, begin: m.BeginStep, block_tables: Sequence[int]) -> "ShardStep":
        """Copy blocks and read what the step's rows mean. Raises `WireError` if it doesn't fit the cache."""
        step = ShardStep(self, begin.segments, block_tables, self._calls_of(begin))
        copies = [copy for copy in begin.copies if copy.group == self.assign.group]
        calls = slice(step.calls.start, step.calls.stop)
        try:
            self.cache.copy_blocks([copy.source for copy in copies], [copy.target for copy in copies], calls)
        except ValueError as error:
            raise WireError(str(error)) from error
        return step

    def _calls_of(self, begin: m.BeginStep) -> range:
        num_calls = len(self.assign.calls)
        if begin.calls is None:
            return range(num_calls)
        if not begin.calls.start < begin.calls.stop <= num_calls:
            raise WireError(f"calls {begin.calls.start} to {begin.calls.stop} are not among the model's {num_calls}")
        return range(begin.calls.start, begin.calls.stop)

    def blocks_of(self, segment: m.Segment, block_tables: Sequence[int]) -> Sequence[int]:
        """The block numbers of a segment. Raises `WireError` if the segment names what isn't there."""
        if segment.group != self.assign.group:
            raise WireError(f"a segment of group {segment.group} came to a worker of group {self.assign.group}")
        if segment.kind is m.SegmentKind.DECODE and segment.num_queries != 1:
            raise WireError(f"a decode segment has one row, not {segment.num_queries}")
        blocks = block_tables[segment.first_block : segment.first_block + segment.num_blocks]
        if len(blocks) != segment.num_blocks:
            raise WireError(f"blocks {segment.first_block} to {segment.first_block + segment.num_blocks} are not there")
        tokens = segment.num_stored + (segment.num_queries if segment.stores else 0)
        if tokens > len(blocks) * self.assign.block_size:
            raise WireError(f"{tokens} tokens do not fit {len(blocks)} blocks of {self.assign.block_size}")
        self._check_blocks(blocks)
        return blocks

    def _check_blocks(self, blocks: Sequence[int]) -> None:
        if any(not 0 <= block < self.assign.num_blocks for block in blocks):
            raise WireError(f"a block outside 0..{self.assign.num_blocks - 1} is named: {list(blocks)}")


class ShardStep:
    """One step's rows on one shard: where its stored rows go and what its query rows see, the same for every call."""

    def __init__(self, shard: Shard, segments: Sequence[m.Segment], block_tables: Sequence[int], calls: range) -> None:
        self.calls = calls
        """Those that the step makes here."""
        self._shard = shard
        self._calls, self._heads = shard.assign.calls, shard.assign.heads
        tables = [shard.blocks_of(segment, block_tables) for segment in segments]
        self._slots = torch.tensor(
            [
                slot
                for segment, blocks in zip(segments, tables, strict=True)
                if segment.stores
                for slot in _slots(segment, blocks, shard.assign.block_size)
            ],
            dtype=torch.int64,
            device=shard.device,
        )
        answered = [(segment, blocks) for segment, blocks in zip(segments, tables, strict=True) if segment.answers]
        self.num_queries = sum(segment.num_queries for segment, _ in answered)
        self._batch = PagedBatch.build(
            [_paged(segment, blocks) for segment, blocks in answered], shard.device, shard.scratch
        )

    def store(self, call: int, first_row: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write k [N, G, Dk] and v [N, G, Dv] of stored rows `first_row`... into their blocks. Raises `WireError`."""
        slots = self._slots[first_row : first_row + k.shape[0]]
        heads, geometry = self._heads[call], self._calls[call]
        expected = (len(slots), heads.stop - heads.start)
        if k.shape != (*expected, geometry.k_size) or v.shape != (*expected, geometry.v_size):
            raise WireError(f"call {call}: k {tuple(k.shape)} and v {tuple(v.shape)} are not {expected} rows and heads")
        self._check_dtypes(call, k, v)
        cache = self._shard.cache
        k, v = k.to(cache.device), v.to(cache.device)
        store_kv(cache.keys(call), cache.values(call), slots, k, v, cache.scales(call))

    def attend(self, call: int, q: torch.Tensor, lse_from: int) -> tuple[list[torch.Tensor], float]:
        """Attention of q [M, H, Dk] over the blocks: [o [M, H, Dv], LSE [M - lse_from, H]] and the seconds it took."""
        heads, geometry = self._heads[call], self._calls[call]
        num_heads = (heads.stop - heads.start) * (geometry.q_heads // geometry.kv_heads)
        if q.shape != (self.num_queries, num_heads, geometry.k_size):
            raise WireError(f"call {call}: q {tuple(q.shape)} is not {(self.num_queries, num_heads, geometry.k_size)}")
        self._check_dtypes(call, q)
        started = time.perf_counter()
        cache = self._shard.cache
        o, lse = paged_attention(
            q.to(cache.device),
            cache.keys(call),
            cache.values(call),
            self._batch,
            scale=geometry.scale,
            window=geometry.window,
            softcap=geometry.softcap,
            scales=cache.scales(call),
        )
        return [o.to(self._shard.wire_dtype), lse[lse_from:]], time.perf_counter() - started

    def _check_dtypes(self, call: int, *tensors: torch.Tensor) -> None:
        for tensor in tensors:
            if tensor.dtype != self._shard.wire_dtype:
                raise WireError(f"call {call}: {tensor.dtype} came where {self._shard.wire_dtype} was agreed on")


def _paged(segment: m.Segment, blocks: Sequence[int]) -> PagedSegment:
    return PagedSegment(
        blocks=blocks,
        num_keys=segment.num_stored + (segment.kind is m.SegmentKind.DECODE),
        first_position=segment.first_position,
        query_position=segment.query_position,
        num_queries=segment.num_queries,
    )


def _slots(segment: m.Segment, blocks: Sequence[int], block_size: int) -> list[int]:
    places = range(segment.num_stored, segment.num_stored + segment.num_queries)
    return [blocks[place // block_size] * block_size + place % block_size for place in places]
