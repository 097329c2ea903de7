"""The operators on random tensors of a shape, and what torch has to do the same: calls without arguments, by name."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pannier.cli.kernel_report import OURS
from pannier.cli.kernel_shapes import BLOCK_SIZE, Shape
from pannier.ops import (
    CallShape,
    KVCache,
    PagedBatch,
    PagedSegment,
    chunk_attention,
    merge_partials,
    paged_attention,
    store_kv,
)
from pannier.ops.paged_attention import batched

PLANNED_ANEW = "pannier, planned anew"
UNCACHED_BYTES = 1 << 28
"""Calls over stored keys take turns, as a model's layers do, over so much that none finds its own still in a cache."""
DRAWN_BLOCKS = 64
"""Blocks of random numbers; the others are copies of them, as drawing numbers takes longer than all else."""

Call = Callable[[], object]
Dense = Callable[[Tensor, Tensor, Tensor, float], Tensor]


@dataclass
class Engines:
    """Who does what a shape says: ours, torch on contiguous keys and values, torch on those in blocks."""

    ours: dict[str, Call]
    contiguous: dict[str, Call] = field(default_factory=dict)
    paged: dict[str, Call] = field(default_factory=dict)


def num_copies(shape: Shape) -> int:
    """How many calls take turns."""
    return -(-UNCACHED_BYTES // shape.stored_bytes) if shape.stored_bytes else 1


def memory_bytes(shape: Shape) -> int:
    """What a shape's engines hold at most: blocks, contiguous copies, one that is gathered, and torch's scores."""
    scores = shape.sequences * shape.rows * shape.keys * shape.heads.q_heads * 4 * 2
    return shape.stored_bytes * (2 * num_copies(shape) + 1) + shape.bytes * 4 + scores


def engines(shape: Shape) -> Engines:
    """All that there is for a shape."""
    match shape.kind:
        case "decode" | "past":
            return OverBlocks(shape).engines()
        case "chunk":
            return _inside_chunks(shape)
        case "store":
            return Engines({OURS: _store(shape)})
        case "merge":
            return Engines({OURS: _merge(shape)})


def is_offered(dtype: str) -> bool:
    """Whether the operators store keys and values in a dtype: tried on a few, whose answer must be about right."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(rows, 1, 64, generator=generator) for rows in (1, 100, 100))
    batch = PagedBatch.build([PagedSegment(range(2), 100, 0, 99, 1)], "cpu")
    answers = []
    try:
        for each in (dtype, "float32"):
            cache = KVCache([CallShape(1, 64, 64)], 2, BLOCK_SIZE, getattr(torch, each), "cpu")
            stored, scales = (cache.keys(0), cache.values(0)), cache.scales(0)
            store_kv(*stored, torch.arange(100), k, v, scales)
            answers.append(paged_attention(q, *stored, batch, scale=0.125, window=0, softcap=0.0, scales=scales)[0])
    except (TypeError, ValueError, RuntimeError):
        return False
    return bool((answers[0] - answers[1]).abs().max() < 0.1)


# ---- Over stored keys


class OverBlocks:
    """Attention over keys and values in blocks, and over the same ones in contiguous tensors."""

    def __init__(self, shape: Shape) -> None:
        heads = shape.heads
        self._shape = shape
        self._scale = heads.size**-0.5
        self._cache, self._segments = filled_cache(shape)
        self._batch = PagedBatch.build(self._segments, "cpu")
        self._q = torch.randn(self._batch.num_rows, heads.q_heads, heads.size).to(_row_dtype(shape))
        self._dense_q = self._q.unflatten(0, (shape.sequences, shape.rows)).transpose(1, 2)
        self._table = torch.tensor([list(segment.blocks) for segment in self._segments])
        self._turns = cycle(range(len(self._cache.shapes)))

    def engines(self) -> Engines:
        """All of them; torch's own attention takes no keys of 8 bits."""
        found = Engines({OURS: self._ours, PLANNED_ANEW: self._planned_anew})
        if self._shape.has_scales:
            return found
        copies = cycle([(k.contiguous(), v.contiguous()) for k, v in map(self._dense, range(len(self._cache.shapes)))])
        found.contiguous = {name: partial(self._contiguous, form, copies) for name, form in FORMS.items()}
        found.paged = {"gather": self._gathered, "gather into kept memory": self._gathered_in_pieces}
        return found

    def _ours(self) -> Tensor:
        return self._attend(paged_attention, self._batch)

    def _planned_anew(self) -> Tensor:
        return self._attend(paged_attention, PagedBatch.build(self._segments, "cpu", self._batch.scratch))

    def _gathered_in_pieces(self) -> Tensor:
        return self._attend(batched.paged_attention, self._batch)

    def _contiguous(self, form: Dense, copies: Iterator[tuple[Tensor, Tensor]]) -> Tensor:
        return packed(form(self._dense_q, *next(copies), self._scale))

    def _gathered(self) -> Tensor:
        return packed(_grouped(self._dense_q, *self._dense(next(self._turns)), self._scale))

    def _attend(self, attend: Callable[..., tuple[Tensor, Tensor]], batch: PagedBatch) -> Tensor:
        call = next(self._turns)
        stored, scales = (self._cache.keys(call), self._cache.values(call)), self._cache.scales(call)
        return attend(self._q, *stored, batch, scale=self._scale, window=0, softcap=0.0, scales=scales)[0]

    def _dense(self, call: int) -> tuple[Tensor, Tensor]:
        k, v = (gather(stored, self._table) for stored in (self._cache.keys(call), self._cache.values(call)))
        return k[:, :, : self._shape.keys], v[:, :, : self._shape.keys]


def filled_cache(shape: Shape) -> tuple[KVCache, list[PagedSegment]]:
    """Random keys and values in blocks that lie anywhere; the last row of a segment sees all its keys."""
    heads = shape.heads
    per_sequence = -(-shape.keys // BLOCK_SIZE)
    num_blocks = shape.sequences * per_sequence
    calls = [CallShape(heads.kv_heads, heads.size, heads.size)] * num_copies(shape)
    cache = KVCache(calls, num_blocks, BLOCK_SIZE, getattr(torch, shape.dtype), "cpu")
    drawn = min(num_blocks, DRAWN_BLOCKS)
    slots = torch.arange(drawn * BLOCK_SIZE)
    targets = list(range(drawn, num_blocks))
    for call in range(len(calls)):
        k, v = (torch.randn(len(slots), heads.kv_heads, heads.size) for _ in range(2))
        store_kv(cache.keys(call), cache.values(call), slots, k, v, cache.scales(call))
        for first in range(0, len(targets), drawn):
            some = targets[first : first + drawn]
            cache.copy_blocks(range(len(some)), some, slice(call, call + 1))
    order = torch.randperm(num_blocks).view(shape.sequences, per_sequence).tolist()
    first_row = shape.keys - 1 if shape.kind == "decode" else shape.keys
    return cache, [PagedSegment(blocks, shape.keys, 0, first_row, shape.rows) for blocks in order]


def gather(stored: Tensor, table: Tensor) -> Tensor:
    """Blocks [P, G, K, D] by a table [S, blocks], as one contiguous tensor [S, G, L, D]."""
    _, kv_heads, _, size = stored.shape
    rows = table.unsqueeze(1) * kv_heads + torch.arange(kv_heads).unsqueeze(1)  # [S, G, blocks]
    return stored.flatten(0, 1)[rows].view(len(table), kv_heads, -1, size)


def packed(o: Tensor) -> Tensor:
    """[S, H, R, D] as [S * R, H, D]."""
    return o.transpose(1, 2).flatten(0, 1)


def _row_dtype(shape: Shape) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, shape.dtype)
    return dtype if dtype.itemsize > 1 else torch.bfloat16


# ---- What torch has for q [S, H, R, D] over k and v [S, G, L, D], all of which each row sees


def _grouped(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Query heads of a KV head as rows of one head."""
    rows = q.unflatten(1, (k.shape[1], -1)).flatten(2, 3)
    return scaled_dot_product_attention(rows, k, v, scale=scale).reshape(q.shape)


def _gqa(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    return scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True)


def _expanded(q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool = False) -> Tensor:
    """Each KV head stands for all its query heads, without being copied."""
    heads = q.shape[1] // k.shape[1]
    rows = q.unflatten(1, (k.shape[1], heads)).flatten(0, 1)
    k, v = (tensor.flatten(0, 1).unsqueeze(1).expand(-1, heads, -1, -1) for tensor in (k, v))
    return scaled_dot_product_attention(rows, k, v, scale=scale, is_causal=causal).reshape(q.shape)


def _products(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Two products of matrices and a softmax."""
    rows = q.unflatten(1, (k.shape[1], -1)).flatten(2, 3)
    weights = torch.matmul(rows * scale, k.transpose(2, 3)).softmax(-1)
    return torch.matmul(weights, v).reshape(q.shape)


FORMS: dict[str, Dense] = {"grouped": _grouped, "gqa": _gqa, "expanded": _expanded, "products": _products}


# ---- Inside chunks, and the rest


def _inside_chunks(shape: Shape) -> Engines:
    heads, scale = shape.heads, shape.heads.size**-0.5
    q, k, v = (
        torch.randn(shape.sequences * shape.rows, count, heads.size).to(_row_dtype(shape))
        for count in (heads.q_heads, heads.kv_heads, heads.kv_heads)
    )
    lengths = [shape.rows] * shape.sequences

    def ours() -> Tensor:
        return chunk_attention(q, k, v, lengths, scale=scale, window=0, softcap=0.0)[0]

    dense_q, dense_k, dense_v = (t.unflatten(0, (shape.sequences, shape.rows)).transpose(1, 2) for t in (q, k, v))
    many_k, many_v = (t.repeat_interleave(heads.q_heads // heads.kv_heads, 1) for t in (dense_k, dense_v))

    def gqa() -> Tensor:
        o = scaled_dot_product_attention(dense_q, dense_k, dense_v, scale=scale, is_causal=True, enable_gqa=True)
        return packed(o)

    def with_repeated_heads() -> Tensor:
        return packed(scaled_dot_product_attention(dense_q, many_k, many_v, scale=scale, is_causal=True))

    def expanded() -> Tensor:
        return packed(_expanded(dense_q, dense_k, dense_v, scale, causal=True))

    return Engines({OURS: ours}, {"gqa": gqa, "heads repeated before": with_repeated_heads, "expanded": expanded})


def _store(shape: Shape) -> Call:
    cache, _ = filled_cache(shape)
    slots = torch.randperm(cache.num_blocks * BLOCK_SIZE)[: shape.sequences * shape.rows]
    k, v = (torch.randn(len(slots), shape.heads.kv_heads, shape.heads.size).to(_row_dtype(shape)) for _ in range(2))
    turns = cycle(range(len(cache.shapes)))

    def store() -> None:
        call = next(turns)
        store_kv(cache.keys(call), cache.values(call), slots, k, v, cache.scales(call))

    return store


def _merge(shape: Shape) -> Call:
    rows, heads = shape.sequences * shape.rows, shape.heads
    partials = [
        tensor
        for _ in range(2)
        for tensor in (torch.randn(rows, heads.q_heads, heads.size), torch.randn(rows, heads.q_heads))
    ]
    return lambda: merge_partials(*partials)
