#!/usr/bin/env python
"""Time the operators on this machine: microseconds per call, beside torch's own attention on dense tensors.

Each case and engine runs in alternating repeats; the figure is the median of the repeats' medians. On a machine that
has other work, `--clock cpu` counts one thread's own time instead. With --json the last line is one object.
"""

import argparse
import itertools
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pannier.ops import (
    CallShape,
    KVCache,
    PagedBatch,
    PagedSegment,
    Scratch,
    chunk_attention,
    merge_partials,
    paged_attention,
    store_kv,
)

BLOCK_SIZE = 64
NUM_CALLS = 30
"""Calls that take turns, as the layers of a model do: a layer's keys are no longer in a cache when its turn comes."""


@dataclass(frozen=True)
class Heads:
    """Geometry of one attention call."""

    kv_heads: int
    q_heads: int
    size: int

    def __str__(self) -> str:
        return f"{self.q_heads}/{self.kv_heads}x{self.size}"


@dataclass(frozen=True)
class Case:
    """One thing that is timed: the engines that do it, by name."""

    name: str
    engines: dict[str, Callable[[], object]]


def random_cache(heads: Heads, num_blocks: int, dtype: torch.dtype) -> KVCache:
    """Keys and values of all calls, drawn at random."""
    shapes = [CallShape(heads.kv_heads, heads.size, heads.size)] * NUM_CALLS
    cache = KVCache(shapes, num_blocks, BLOCK_SIZE, dtype, "cpu")
    for call in range(NUM_CALLS):
        cache.keys(call).normal_()
        cache.values(call).normal_()
    return cache


def decode_cases(heads: Heads, lengths: list[int], dtype: torch.dtype) -> list[Case]:
    """Rows of as many sequences as there are lengths: attention over all stored keys, and storing one token each."""
    per_sequence = [-(-length // BLOCK_SIZE) for length in lengths]
    cache = random_cache(heads, sum(per_sequence), dtype)
    turns = itertools.cycle(range(NUM_CALLS))
    free = torch.randperm(cache.num_blocks).tolist()
    segments = [
        PagedSegment([free.pop() for _ in range(count)], length, 0, length - 1, 1)
        for count, length in zip(per_sequence, lengths, strict=True)
    ]
    scratch = Scratch()
    batch = PagedBatch.build(segments, "cpu", scratch)
    q = torch.randn(len(lengths), heads.q_heads, heads.size).to(dtype)
    slots = torch.tensor(
        [segment.blocks[-1] * BLOCK_SIZE + (segment.num_keys - 1) % BLOCK_SIZE for segment in segments]
    )
    k = torch.randn(len(lengths), heads.kv_heads, heads.size).to(dtype)

    def attend(batch: PagedBatch, softcap: float = 0.0) -> object:
        call = next(turns)
        scale = heads.size**-0.5
        return paged_attention(q, cache.keys(call), cache.values(call), batch, scale=scale, window=0, softcap=softcap)

    def store() -> None:
        call = next(turns)
        store_kv(cache.keys(call), cache.values(call), slots, k, k)

    label = f"{len(lengths)} sequences of {min(lengths)}-{max(lengths)}, {heads} {_short(dtype)}"
    return [
        Case(f"decode {label}", {"pannier": lambda: attend(batch), "torch": dense_decode(heads, lengths, dtype)}),
        Case(f"decode first call {label}", {"pannier": lambda: attend(PagedBatch.build(segments, "cpu", scratch))}),
        Case(f"decode softcap {label}", {"pannier": lambda: attend(batch, 30.0)}),
        Case(f"store {len(lengths)} rows, {heads} {_short(dtype)}", {"pannier": store}),
    ]


def dense_decode(heads: Heads, lengths: list[int], dtype: torch.dtype) -> Callable[[], Tensor]:
    """The same with keys at hand in one padded tensor: what transformers calls in a static batch."""
    longest = max(lengths)
    q = torch.randn(len(lengths), heads.q_heads, 1, heads.size).to(dtype)
    shape = (len(lengths), heads.kv_heads, longest, heads.size)
    stored = [(torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)) for _ in range(NUM_CALLS)]
    turns = itertools.cycle(stored)
    mask = (torch.arange(longest) < torch.tensor(lengths).unsqueeze(1)).view(len(lengths), 1, 1, longest)
    return lambda: scaled_dot_product_attention(q, *next(turns), attn_mask=mask, enable_gqa=True)


def chunk_cases(heads: Heads, lengths: list[int], dtype: torch.dtype) -> list[Case]:
    """Causal attention inside chunks of these lengths; torch's own needs them to be equal."""
    rows = sum(lengths)
    q = torch.randn(rows, heads.q_heads, heads.size).to(dtype)
    k = torch.randn(rows, heads.kv_heads, heads.size).to(dtype)
    scale = heads.size**-0.5
    dense_q, dense_k = (tensor.unflatten(0, (len(lengths), -1)).transpose(1, 2) for tensor in (q, k))

    def attend(window: int) -> object:
        return chunk_attention(q, k, k, lengths, scale=scale, window=window, softcap=0.0)

    def dense() -> Tensor:
        return scaled_dot_product_attention(dense_q, dense_k, dense_k, is_causal=True, enable_gqa=True)

    label = f"{len(lengths)} of {lengths[0]} rows, {heads} {_short(dtype)}"
    return [
        Case(f"chunk {label}", {"pannier": lambda: attend(0), "torch": dense}),
        Case(f"chunk window {lengths[0] // 2} {label}", {"pannier": lambda: attend(lengths[0] // 2)}),
    ]


def past_cases(heads: Heads, rows: int, past: int, dtype: torch.dtype) -> list[Case]:
    """A chunk over its stored past, and merging that with the chunk's own part."""
    blocks = list(range(-(-past // BLOCK_SIZE)))
    cache = random_cache(heads, len(blocks), dtype)
    keys, values = cache.keys(0), cache.values(0)
    batch = PagedBatch.build([PagedSegment(blocks, past, 0, past, rows)], "cpu")
    q = torch.randn(rows, heads.q_heads, heads.size).to(dtype)
    o, lse = torch.randn(rows, heads.q_heads, heads.size), torch.randn(rows, heads.q_heads)
    answer = o.to(dtype)

    def attend() -> object:
        return paged_attention(q, keys, values, batch, scale=heads.size**-0.5, window=0, softcap=0.0)

    return [
        Case(f"{rows} rows over a past of {past}, {heads} {_short(dtype)}", {"pannier": attend}),
        Case(f"merge {rows} rows, {heads} {_short(dtype)}", {"pannier": lambda: merge_partials(o, lse, answer, lse)}),
    ]


def all_cases(dtype: torch.dtype) -> list[Case]:
    """The shapes of a small model with three KV heads, and a shard of a larger one."""
    lengths = torch.randint(140, 257, (32,), generator=torch.Generator().manual_seed(0)).tolist()
    small = Heads(kv_heads=3, q_heads=9, size=64)
    return [
        *decode_cases(small, lengths, dtype),
        *decode_cases(Heads(kv_heads=2, q_heads=8, size=128), [8 * length for length in lengths[:8]], dtype),
        *chunk_cases(small, [128] * 4, dtype),
        *chunk_cases(small, [16] * 32, dtype),
        *past_cases(small, 128, 1000, dtype),
    ]


def measure(cases: list[Case], repeats: int, seconds: float, clock: Callable[[], float]) -> list[dict[str, Any]]:
    """Rows of the report; the repeats of all cases alternate."""
    medians: dict[tuple[str, str], list[float]] = {}
    for _ in range(repeats):
        for case in cases:
            for engine, call in case.engines.items():
                medians.setdefault((case.name, engine), []).append(_median_us(call, seconds, clock))
    return [
        {
            "case": case,
            "engine": engine,
            "metric": "call_us",
            "value": round(statistics.median(found), 1),
            "unit": "us",
            "repeats": [round(value, 1) for value in found],
        }
        for (case, engine), found in medians.items()
    ]


def _median_us(call: Callable[[], object], seconds: float, clock: Callable[[], float]) -> float:
    for _ in range(3):
        call()
    found: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(found) < 3:
        start = clock()
        call()
        found.append(clock() - start)
    return statistics.median(found) * 1e6


def ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Time of torch's own divided by ours: above 1 ours is faster."""
    value = {(row["case"], row["engine"]): row["value"] for row in rows}
    return [
        {
            "case": case,
            "metric": "speed",
            "of": "pannier",
            "to": "torch",
            "value": round(theirs / value[case, "pannier"], 2),
        }
        for (case, engine), theirs in value.items()
        if engine == "torch"
    ]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--dtype", choices=["bfloat16", "float32", "both"], default="both")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="cpu: one thread, and its own time")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.2, help="for each case and repeat")
    options = parser.parse_args()
    threads = 1 if options.clock == "cpu" else options.threads
    torch.set_num_threads(threads)
    dtypes = ["bfloat16", "float32"] if options.dtype == "both" else [options.dtype]
    clock = time.thread_time if options.clock == "cpu" else time.perf_counter
    with torch.inference_mode():
        cases = [case for name in dtypes for case in all_cases(getattr(torch, name))]
        rows = measure(cases, options.repeats, options.seconds, clock)
    for row in rows:
        print(f"{row['case']:70} {row['engine']:8} {row['value']:10.1f} us   {row['repeats']}")
    for ratio in ratios(rows):
        print(f"{ratio['case']:70} {ratio['of']} against {ratio['to']}: {ratio['value']}x")
    if options.json:
        print(json.dumps(_report(rows, threads, options.clock)))


def _report(rows: list[dict[str, Any]], threads: int, clock: str) -> dict[str, Any]:
    return {
        "command": "scripts/bench_ops.py",
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "threads": threads,
            "clock": clock,
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        },
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "rows": rows,
        "ratios": ratios(rows),
    }


if __name__ == "__main__":
    main()
