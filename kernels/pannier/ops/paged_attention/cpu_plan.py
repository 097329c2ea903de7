"""From segments to the tables that `cpu.cpp` reads: who attends over which keys, in pieces for all threads."""

import ctypes
from array import array
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from pannier.ops.native import DTYPES, Library
from pannier.ops.paged_attention.plan import Bucket, Geometry, existing_views, make_buckets
from pannier.ops.paged_attention.segment import PagedSegment, View

TILE = 64
"""As in `cpu.cpp`."""

MAX_ROWS = {"avx512_bf16": 256, "avx512": 32, "avx2": 4, "generic": 1}
"""Of a segment, by build; with more, gathering the keys for torch's products of matrices may be faster.

Measured in bf16 over 192 and 1000 keys, all builds on one processor that has AVX-512 and bf16, which torch's own
products used each time. The first build was still 1.3 to 1.7 times as fast with 512 rows; more weren't tried."""

QUERIES = 16
"""Query heads of some rows that go over the keys together, as `MAX_QUERIES` in `cpu.cpp`."""

TASKS_PER_THREAD = 4
"""When there are fewer, segments are split: threads that end early must find other work."""

SHARED_BYTES = 2**18
"""Reading so many takes longer than waking the other threads."""


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
        """Bytes of a key and its value."""
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
    buckets: tuple[Bucket, ...]
    """Segments of many rows, for the batched form."""
    owned: tuple[object, ...]
    """The memory behind the address."""


class _Tables:
    """The tables while they grow; numbers as in the structures of `cpu.cpp`."""

    def __init__(self, target_keys: int) -> None:
        self.parts = array("i")
        self.merges = array("i")
        self.blocks = array("i")
        self.partial_rows = 0
        self._target_keys = target_keys

    def add(self, view: View, geometry: CpuGeometry) -> None:
        """All rows of a view, so many at a time."""
        table = len(self.blocks)
        self.blocks.extend(view.blocks)
        step = max(1, QUERIES // geometry.heads_per_kv)
        for row in range(0, view.num_rows, step):
            self._add_rows(view, geometry, table, row, min(step, view.num_rows - row))

    def _add_rows(self, view: View, geometry: CpuGeometry, table: int, first: int, num_rows: int) -> None:
        ahead = view.row_position - view.key_position + first
        start = max(0, ahead + 1 - geometry.window) if geometry.window else 0
        stop = min(view.num_keys, ahead + num_rows)
        row = view.first_row + first
        ranges = _split(start, stop, self._target_keys)
        if len(ranges) == 1:
            self.parts.extend((table, start, stop, ahead, row, num_rows, row, 0))
            return
        self.merges.extend((row, num_rows, self.partial_rows, len(ranges)))
        for part_start, part_stop in ranges:
            self.parts.extend((table, part_start, part_stop, ahead, row, num_rows, self.partial_rows, 1))
            self.partial_rows += num_rows


def make_cpu_plan(segments: Sequence[PagedSegment], geometry: CpuGeometry, built: Library) -> CpuPlan:
    """Tables for these segments.

    Raises ValueError when blocks are missing, IndexError for a block number behind the last one.
    """
    views, num_rows = existing_views(segments, geometry.window, geometry.block_size, geometry.num_blocks)
    few = [view for view in views if view.num_rows <= MAX_ROWS[built.name]]
    many = [view for view in views if view.num_rows > MAX_ROWS[built.name]]
    num_keys = sum(view.num_keys * view.num_rows for view in few)
    threads = geometry.num_threads if num_keys * geometry.kv_heads * geometry.key_bytes >= SHARED_BYTES else 1
    tables = _Tables(_target_keys(num_keys, geometry.kv_heads, threads))
    for view in few:
        tables.add(view, geometry)
    plan, owned = _fill(tables, geometry, threads, built.parallel)
    return CpuPlan(
        address=ctypes.addressof(plan),
        covers_all=not many and sum(view.num_rows for view in views) == num_rows,
        buckets=make_buckets(many, _batched_geometry(geometry), num_rows, torch.device("cpu")),
        owned=(plan, *owned),
    )


def _target_keys(num_keys: int, kv_heads: int, threads: int) -> int:
    """Keys that one task should have at most: whole tiles."""
    if threads == 1:
        return max(1, num_keys)
    return TILE * -(-num_keys * kv_heads // (threads * TASKS_PER_THREAD * TILE))


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
        num_parts=len(tables.parts) // 8,
        num_merges=len(tables.merges) // 4,
        num_threads=threads,
        kv_heads=geometry.kv_heads,
        heads_per_kv=geometry.heads_per_kv,
        k_size=geometry.k_size,
        v_size=geometry.v_size,
        block_size=geometry.block_size,
        window=geometry.window,
        q_type=DTYPES[geometry.q_dtype],
        kv_type=DTYPES[geometry.kv_dtype],
        scale=geometry.scale,
        softcap=geometry.softcap,
    )
    return plan, (tables, partial_o, partial_lse)


def _batched_geometry(geometry: CpuGeometry) -> Geometry:
    return Geometry(geometry.window, geometry.block_size, geometry.kv_heads, geometry.heads_per_kv)
