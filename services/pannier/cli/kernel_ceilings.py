"""What a machine gives at most: the rate at which its memory is read, and that of products of matrices in bf16."""

import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from torch.nn.functional import linear

from pannier.cli.kernel_shapes import GEMM, STREAM
from pannier.ops.huge_pages import ask_for_huge_pages
from pannier.ops.read_stream import read_stream

STREAM_BYTES = 1 << 28
ROWS, SIZE = 512, 4096
"""Of the product: as many rows as a chunk of a prompt has, by a square matrix."""


class Ceilings:
    """Samples of both; `found` keeps them all, in GB/s and GFLOP/s. All times are those of one clock."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.found: dict[str, list[float]] = defaultdict(list)
        small, huge = (torch.empty(STREAM_BYTES // 4) for _ in range(2))
        ask_for_huge_pages(huge)
        self._pages = [small.fill_(1.0), huge.fill_(1.0)]
        self._x = torch.randn(ROWS, SIZE).bfloat16()
        self._weight = torch.randn(SIZE, SIZE).bfloat16()

    def sample(self, name: str, seconds: float) -> float:
        """The read stream is the better one of small and huge pages, the product that of both ways to ask for it."""
        calls: dict[str, tuple[Callable[[], object], ...]] = {
            STREAM: tuple(partial(read_stream, data) for data in self._pages),
            GEMM: (partial(torch.mm, self._x, self._weight), partial(linear, self._x, self._weight)),
        }
        amount = {STREAM: STREAM_BYTES, GEMM: 2 * ROWS * SIZE * SIZE}[name]
        best = max(self.rate(call, amount / 1e9, seconds / 2) for call in calls[name])
        self.found[name].append(best)
        return best

    def rate(self, call: Callable[[], object], amount: float, seconds: float) -> float:
        """So much of `amount` per second: the median of as many calls as fit, at least one."""
        times: list[float] = []
        end = self._clock() + seconds
        while not times or self._clock() < end:
            start = self._clock()
            call()
            times.append(self._clock() - start)
        return amount / median(times)
