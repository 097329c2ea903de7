"""What of a GPU decides how the Triton kernels are tiled, and what they multiply."""

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

KIB = 1024
PROGRAMS_PER_PROCESSOR = 4
"""Of attention, so that while one waits for its keys others have theirs."""


class Gpu(NamedTuple):
    """A device as the kernels see it."""

    num_programs: int
    """So many keep it busy."""
    has_tensor_cores: bool
    """Of a kind that Triton uses: Ampere's and later. Elsewhere it multiplies in fp32, whatever the inputs, and they
    are better widened once, when they are read."""
    has_fp8: bool = False
    """Whether it converts fp8."""

    @property
    def num_stages(self) -> int:
        """Tiles of keys that are under way at once: Turing doesn't copy to shared memory in the background."""
        return 2 if self.has_tensor_cores else 1


class Tiling(NamedTuple):
    """How a kernel of attention uses a program: 99 KiB of shared memory at most, 64 on Turing, no spilled registers.

    `tests/ops/test_triton_compiled.py` compiles them and looks.
    """

    multiplied: tl.dtype
    """What is multiplied; sums are fp32."""
    k_width: int
    v_width: int
    """Sizes of keys and values, rounded up to a power of two."""
    pairs: int
    """Pairs of a query row and a head, at most."""
    keys: int
    """At a time."""
    warps: int
    """For so many pairs."""


@cache
def gpu_of(device: torch.device) -> Gpu:
    """The traits of a device; for a CPU those under which Triton's interpreter, which is wrong in bf16, is right."""
    if device.type == "cpu":
        return Gpu(num_programs=8, has_tensor_cores=False)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return gpu_with(torch.cuda.get_device_capability(device), processors)


def gpu_with(capability: tuple[int, int], processors: int) -> Gpu:
    """The traits of a device of this compute capability with so many multiprocessors."""
    return Gpu(processors * PROGRAMS_PER_PROCESSOR, capability >= (8, 0), capability >= (8, 9))


@cache
def tiling_of(gpu: Gpu, k_size: int, v_size: int, *dtypes: torch.dtype) -> Tiling:
    """How attention over keys and values of these sizes is tiled, where `dtypes` are those of q, k and v."""
    dtype = _multiplied(gpu, dtypes)
    k_width, v_width = width_of(k_size), width_of(v_size)
    tensor_cores = dtype != torch.float32
    key_bytes = (32 if tensor_cores else 16) * KIB
    return Tiling(
        multiplied={torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[dtype],
        k_width=k_width,
        v_width=v_width,
        pairs=_fitting(16 * KIB, k_width * dtype.itemsize, 16, 64),
        keys=_fitting(key_bytes, (k_width + v_width) * dtype.itemsize, 16, 64),
        warps=4 if tensor_cores else 8,
    )


def _multiplied(gpu: Gpu, dtypes: tuple[torch.dtype, ...]) -> torch.dtype:
    """The dtype that all of them have but for those of 8 bits, if tensor cores take it; else fp32.

    bf16 beside fp16 are multiplied in fp32, too: neither holds what the other may.
    """
    wide = {dtype for dtype in dtypes if dtype.itemsize > 1}
    if gpu.has_tensor_cores and wide in ({torch.float16}, {torch.bfloat16}):
        return wide.pop()
    return torch.float32


def is_fp8(dtype: torch.dtype) -> bool:
    """Whether it is the fp8 that a cache may have."""
    return dtype == torch.float8_e4m3fn


def as_stored(cache: Tensor) -> Tensor:
    """A cache as kernels take it: fp8 as bytes, since Triton refuses its type where a GPU doesn't convert it."""
    return cache.view(torch.uint8) if is_fp8(cache.dtype) else cache


def width_of(size: int) -> int:
    """The power of two, 16 at least, that a dimension of this size takes."""
    return max(16, 1 << (size - 1).bit_length())


def _fitting(room: int, each: int, least: int, most: int) -> int:
    """The largest power of two from `least` to `most` so that as many of `each` bytes fit; `least` if none does."""
    return min(most, max(least, 1 << max(0, (room // each).bit_length() - 1)))


def launching_on(device: torch.device) -> AbstractContextManager[Any]:
    """Kernels that are launched inside run on this device: Triton takes the current one, whatever the tensors' is."""
    return nullcontext() if device.type == "cpu" else torch.cuda.device(device)
