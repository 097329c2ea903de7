"""What one device does by itself: products of matrices, reads, conversions, attention. Rates and seconds, medians."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle
from statistics import median

import torch

from pannier.ops import CallShape, KVCache, PagedBatch, PagedSegment, paged_attention, store_kv
from pannier.planner.profile import AttentionTime, GemmRate
from pannier.planner.sizes import CallSize

WEIGHT = 2048
"""Rows and columns of a weight."""
UNCACHED = {"cpu": 1 << 28, "cuda": 1 << 31}
"""Bytes that calls go around in, so that none finds its own still in a cache."""
BLOCK = 64
GEMM_ROWS = (1, 4, 16, 64, 256)
CASTS = (("bfloat16", "float32"), ("float32", "bfloat16"), ("float16", "float32"), ("bfloat16", "float16"))


class Probe:
    """Times calls on one device, each for `seconds`."""

    def __init__(self, device: torch.device, seconds: float) -> None:
        self.device = device
        self._seconds = seconds

    def time(self, call: Callable[[], object]) -> float:
        """Median seconds of as many calls as fit, at least three behind one that warms up."""
        times: list[float] = []
        call()
        self._wait()
        end = time.perf_counter() + self._seconds
        while len(times) < 3 or time.perf_counter() < end:
            started = time.perf_counter()
            call()
            self._wait()
            times.append(time.perf_counter() - started)
        return median(times)

    def read(self) -> float:
        """Bytes per second of a stream of reads."""
        if self.device.type == "cuda":
            data = torch.ones(UNCACHED["cuda"] // 4, device=self.device)
            return data.nbytes / self.time(data.sum)
        from pannier.cli.kernel_ceilings import Ceilings
        from pannier.cli.kernel_shapes import STREAM

        return 1e9 * Ceilings().sample(STREAM, self._seconds)

    def gemms(self, dtype: str, threads: int) -> Iterator[GemmRate]:
        """Rows by weights that are no longer in a cache."""
        kind: torch.dtype = getattr(torch, dtype)
        count = max(2, UNCACHED[self.device.type] // (WEIGHT * WEIGHT * kind.itemsize))
        weights = cycle([torch.randn(WEIGHT, WEIGHT).to(self.device, kind) for _ in range(count)])
        for rows in GEMM_ROWS:
            x = torch.randn(rows, WEIGHT).to(self.device, kind)
            seconds = self.time(lambda x=x: torch.nn.functional.linear(x, next(weights)))  # type: ignore[misc]
            yield GemmRate(
                dtype=dtype,
                rows=rows,
                threads=threads,
                bytes_per_s=WEIGHT * WEIGHT * kind.itemsize / seconds,
                flops=2 * rows * WEIGHT * WEIGHT / seconds,
            )

    def casts(self) -> dict[str, float]:
        """Bytes per second, read and written together, by "from-to"."""
        found = {}
        for name, other in CASTS:
            source = torch.zeros(UNCACHED[self.device.type] // 8, dtype=getattr(torch, name), device=self.device)
            target = torch.empty_like(source, dtype=getattr(torch, other))
            seconds = self.time(lambda s=source, t=target: t.copy_(s))  # type: ignore[misc]
            found[f"{name}-{other}"] = (source.nbytes + target.nbytes) / seconds
        return found

    def attention(self, call: CallSize, dtype: str, rows: int, context: int) -> float:
        """Seconds of one call for so many decode rows, their own K and V stored first."""
        kind: torch.dtype = getattr(torch, dtype)
        blocks = -(-context // BLOCK)
        shape = CallShape(call.kv_heads, call.k_size, call.v_size)
        call_bytes = rows * blocks * BLOCK * shape.token_elements * kind.itemsize
        copies = max(1, min(64, -(-UNCACHED[self.device.type] // call_bytes)))
        cache = KVCache([shape] * copies, rows * blocks, BLOCK, kind, self.device)
        _fill(cache)
        segments = [
            PagedSegment(range(row * blocks, (row + 1) * blocks), context, 0, context - 1, 1) for row in range(rows)
        ]
        batch = PagedBatch.build(segments, self.device)
        slots = torch.tensor([row * blocks * BLOCK + context - 1 for row in range(rows)], device=self.device)
        q = torch.randn(rows, call.q_heads, call.k_size).to(self.device, kind)
        k, v = (torch.randn(rows, call.kv_heads, size).to(self.device, kind) for size in (call.k_size, call.v_size))
        turns = cycle(range(copies))

        def attend() -> torch.Tensor:
            turn = next(turns)
            keys, values = cache.keys(turn), cache.values(turn)
            store_kv(keys, values, slots, k, v)
            scale = call.k_size**-0.5
            o, _ = paged_attention(q, keys, values, batch, scale=scale, window=call.window, softcap=0.0)
            return o.to(kind)

        return self.time(attend)

    def attention_times(
        self, model: str, call: CallSize, dtype: str, threads: int, grid: list[tuple[int, int]], *, is_shared: bool
    ) -> Iterator[AttentionTime]:
        """One call of a model for each rows and context of a grid."""
        for rows, context in grid:
            yield AttentionTime(
                model=model,
                dtype=dtype,
                threads=threads,
                rows=rows,
                context=context,
                is_shared=is_shared,
                seconds=self.attention(call, dtype, rows, context),
            )

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _fill(cache: KVCache) -> None:
    for call in range(len(cache.shapes)):
        for stored in (cache.keys(call), cache.values(call)):
            flat = stored.view(-1)
            drawn = torch.randn(min(flat.numel(), 1 << 18)).to(stored.device, stored.dtype)
            for part in flat.split(drawn.numel()):
                part.copy_(drawn[: part.numel()])


@contextmanager
def a_reader_beside() -> Iterator[None]:
    """Another process, on one thread, that reads from memory until this ends."""
    code = (
        "import sys, threading, torch\n"
        "torch.set_num_threads(1)\n"
        "data, going = torch.ones(1 << 26), [1]\n"
        "threading.Thread(target=lambda: (sys.stdin.read(), going.clear()), daemon=True).start()\n"
        "print('reads', flush=True)\n"
        "while going: data.sum()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reader:
        assert reader.stdin is not None
        assert reader.stdout is not None
        try:
            reader.stdout.readline()
            yield
        finally:
            reader.stdin.close()
