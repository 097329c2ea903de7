"""From segments to the tables that `cpu.cpp` reads: who attends over which keys, in pieces for all threads."""

import ctypes
from array import array
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from pannier.ops.native import DTYPES, STORED_DTYPES, Library
from pannier.ops.paged_attention.plan import existing_views
from pannier.ops.paged_attention.segment import PagedSegment, View

TILE = 64
"""As in `cpu.cpp`."""

FEW_QUERIES = 16
MANY_QUERIES = 256
"""Query heads of some rows that go over the keys together, as in `cpu.cpp`: of a segment that has no more, and of one
that has. From 20 on the second way is faster, with every build and dtype that was measured; it is also 1.1 to 4 times
as fast as gathering the keys for torch's own attention."""

HELD_QUERIES = 128
"""Of few queries, those of all KV heads that a part takes in turn, tile by tile: as in `cpu.cpp`."""

PARTS_PER_THREAD = 8
"""When there are fewer, segments are split: threads that end early must find other work."""

PART_KEYS = 256
"""Keys that a part has at least, if taking fewer heads together is what that costs: each part's sums are written once,
and a block's heads are read faster together than one by one."""

SHARED_BYTES = 2**18
"""Reading so many takes longer than waking the other threads."""

PART_NUMBERS = 10
"""Of the tables: as many as `Part` of `call.h` has."""


class CpuGeometry(NamedTuple):
    """What of a call decides its tables; equal for the calls of a model but for two or three kinds."""

    scale: float
    window: int
    softcap: float
    num_blocks: int
    kv_heads: int
    block_size: int
    k_size: int
    v_size: int
    heads_per_kv: int
    row_stride: int
    head_stride: int
    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    num_threads: int

    @property
    def key_bytes(self) -> int:
        """Bytes of a key and its value, without scales."""
        return (self.k_size + self.v_size) * self.kv_dtype.itemsize


class _Plan(ctypes.Structure):
    """`Plan` of `cpu.cpp`, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("parts", "merges", "tables", "partial_o", "partial_lse", "parallel")),
        *((name, ctypes.c_int64) for name in ("row_stride", "head_stride")),
        *((name, ctypes.c_int32) for name in ("num_parts", "num_merges", "num_threads")),
        *((name, ctypes.c_int32) for name in ("kv_heads", "heads_per_kv", "k_size", "v_size", "block_size", "window")),
        *((name, ctypes.c_int32) for name in ("q_type", "kv_type")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    )


class CpuPlan(NamedTuple):
    """What a call of this geometry does."""

    address: int
    """Of the tables."""
    covers_all: bool
    """Whether they write every row."""
    owned: tuple[object, ...]
    """The memory behind the address."""


class _Tables:
    """The tables while they grow; numbers as in the structures of `cpu.cpp`."""

    def __init__(self, part_work: int) -> None:
        self.parts = array("i")
        self.merges = array("i")
        self.blocks = array("i")
        self.partial_rows = 0
        self._part_work = part_work

    def add(self, view: View, geometry: CpuGeometry) -> None:
        """All rows of a view, so many at a time."""
        table = len(self.blocks)
        self.blocks.extend(view.blocks)
        is_few = view.num_rows * geometry.heads_per_kv <= FEW_QUERIES
        step = max(1, (FEW_QUERIES if is_few else MANY_QUERIES) // geometry.heads_per_kv)
        for row in range(0, view.num_rows, step):
            num_rows = min(step, view.num_rows - row)
            most = HELD_QUERIES // (num_rows * geometry.heads_per_kv) if is_few else 1
            self._add_rows(view, geometry, table, row, num_rows, most)

    def _add_rows(
        self, view: View, geometry: CpuGeometry, table: int, first: int, num_rows: int, most_heads: int
    ) -> None:
        ahead = view.row_position - view.key_position + first
        start = max(0, ahead + 1 - geometry.window) if geometry.window else 0
        stop = min(view.num_keys, ahead + num_rows)
        row = view.first_row + first
        fitting = self._part_work // (min(stop - start, PART_KEYS) * num_rows)
        num_heads = max(1, min(geometry.kv_heads, most_heads, fitting))
        heads = _shares(geometry.kv_heads, num_heads)
        ranges = _split(start, stop, TILE * -(-self._part_work // (TILE * num_rows * num_heads)))
        if len(ranges) == 1:
            for head in heads:
                self.parts.extend((table, start, stop, ahead, row, num_rows, row, 0, *head))
            return
        self.merges.extend((row, num_rows, self.partial_rows, len(ranges)))
        for part_start, part_stop in ranges:
            for head in heads:
                self.parts.extend((table, part_start, part_stop, ahead, row, num_rows, self.partial_rows, 1, *head))
            self.partial_rows += num_rows


def make_cpu_plan(segments: Sequence[PagedSegment], geometry: CpuGeometry, built: Library) -> CpuPlan:
    """Tables for these segments.

    Raises ValueError when blocks are missing, IndexError for a block number behind the last one.
    """
    views, num_rows = existing_views(segments, geometry.window, geometry.block_size, geometry.num_blocks)
    work = sum(view.num_keys * view.num_rows for view in views)
    threads = geometry.num_threads if work * geometry.kv_heads * geometry.key_bytes >= SHARED_BYTES else 1
    tables = _Tables(_part_work(work * geometry.kv_heads, threads))
    for view in views:
        tables.add(view, geometry)
    plan, owned = _fill(tables, geometry, threads, built.parallel)
    return CpuPlan(
        address=ctypes.addressof(plan),
        covers_all=sum(view.num_rows for view in views) == num_rows,
        owned=(plan, *owned),
    )


def _part_work(work: int, threads: int) -> int:
    """Keys times rows times KV heads that one part should have at most."""
    return max(1, work if threads == 1 else work // (threads * PARTS_PER_THREAD))


def _shares(kv_heads: int, most: int) -> list[tuple[int, int]]:
    """The first KV head and how many, of shares of about the same size."""
    count = -(-kv_heads // most)
    edges = [kv_heads * share // count for share in range(count + 1)]
    return [(start, stop - start) for start, stop in pairwise(edges)]


def _split(start: int, stop: int, target: int) -> list[tuple[int, int]]:
    """Ranges of about the same length, no longer than the target, that begin with a tile but for the first one."""
    count = -(-(stop - start) // target)
    length = TILE * -(-(stop - start) // (count * TILE))
    edges = [start, *range(start - start % TILE + length, stop, length), stop]
    return list(pairwise(edges))


def _fill(tables: _Tables, geometry: CpuGeometry, threads: int, parallel: int) -> tuple[_Plan, tuple[object, ...]]:
    heads = geometry.kv_heads * geometry.heads_per_kv
    partial_o = torch.empty(tables.partial_rows * heads * geometry.v_size)
    partial_lse = torch.empty(tables.partial_rows * heads)
    plan = _Plan(
        parts=tables.parts.buffer_info()[0],
        merges=tables.merges.buffer_info()[0],
        tables=tables.blocks.buffer_info()[0],
        partial_o=partial_o.data_ptr(),
        partial_lse=partial_lse.data_ptr(),
        parallel=parallel,
        row_stride=geometry.row_stride,
        head_stride=geometry.head_stride,
        num_parts=len(tables.parts) // PART_NUMBERS,
        num_merges=len(tables.merges) // 4,
        num_threads=threads,
        kv_heads=geometry.kv_heads,
        heads_per_kv=geometry.heads_per_kv,
        k_size=geometry.k_size,
        v_size=geometry.v_size,
        block_size=geometry.block_size,
        window=geometry.window,
        q_type=DTYPES[geometry.q_dtype],
        kv_type=STORED_DTYPES[geometry.kv_dtype],
        scale=geometry.scale,
        softcap=geometry.softcap,
    )
    return plan, (tables, partial_o, partial_lse)
