"""What a device has and can do: memory, measured read bandwidth, element types that it computes natively."""

import time
from collections.abc import Callable, Sequence

import torch

from pannier.runtime.errors import DeviceError
from pannier.runtime.host import Memory, host_memory, instruction_sets
from pannier.wire import Dtype

_KV_SHARE = {"cpu": 0.25, "cuda": 0.9}
"""Of the free memory, for KV blocks, when nobody says how much: a CPU's memory also serves others."""
_READ_BYTES = {"cpu": 128 << 20, "cuda": 1 << 30}
"""Larger than the caches."""
_MEASURE_S = 0.15
_PRODUCT_S = 0.05


def open_device(name: str) -> torch.device:
    """The device called `cpu` or `cuda:N`. Raises `DeviceError` when this machine hasn't got it."""
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        there = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
        raise DeviceError(f"there is no device {name}; this machine has {', '.join(there)}")
    return device


def memory(device: torch.device) -> Memory:
    """Memory of the device; for the CPU, of the host."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return Memory(total, free)
    return host_memory()


def kv_memory(device: torch.device, wanted: int | None) -> int:
    """Bytes for KV blocks: what is wanted, or a share of what is free. Raises `DeviceError` when it isn't there."""
    free = memory(device).free
    if wanted is None:
        return int(free * _KV_SHARE[device.type])
    if wanted > free:
        raise DeviceError(f"{device} has {free >> 20} MiB free, less than the {wanted >> 20} MiB wanted for KV blocks")
    return int(wanted)


def read_bandwidth(device: torch.device) -> float:
    """Bytes per second that the device reads from its memory: the best of the passes of a sixth of a second."""
    data = torch.zeros(_READ_BYTES[device.type] // 4, dtype=torch.float32, device=device)
    best_s, end = float("inf"), time.perf_counter() + _MEASURE_S
    while time.perf_counter() < end:
        best_s = min(best_s, _pass_s(data))
    return data.nbytes / best_s


def product_s(multiply: Callable[[torch.Tensor], object], weights: Sequence[torch.Tensor]) -> float:
    """Seconds of a product with one weight: of the fastest pass over all, which should be more than caches hold."""
    best_s, end = float("inf"), time.perf_counter() + _PRODUCT_S
    while time.perf_counter() < end or best_s == float("inf"):
        begin = time.perf_counter()
        for weight in weights:
            multiply(weight)
        best_s = min(best_s, time.perf_counter() - begin)
    return best_s / len(weights)


def native_dtypes(device: torch.device) -> tuple[Dtype, ...]:
    """Element types that the device multiplies without converting first, widest first."""
    native = _native_on_gpu(device) if device.type == "cuda" else _native_on_cpu(instruction_sets())
    return (Dtype.FLOAT32, *native)


def _native_on_gpu(device: torch.device) -> list[Dtype]:
    with torch.cuda.device(device):
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    has_fp8 = torch.cuda.get_device_capability(device) >= (8, 9)
    return [*[Dtype.BFLOAT16] * has_bf16, Dtype.FLOAT16, *[Dtype.FLOAT8_E4M3] * has_fp8]


def _native_on_cpu(sets: frozenset[str]) -> list[Dtype]:
    has_bf16 = bool(sets & {"avx512_bf16", "amx_bf16", "bf16"})
    has_f16 = bool(sets & {"avx512_fp16", "amx_fp16", "asimdhp"})
    return [*[Dtype.BFLOAT16] * has_bf16, *[Dtype.FLOAT16] * has_f16]


def _pass_s(data: torch.Tensor) -> float:
    begin = time.perf_counter()
    data.sum().item()
    return time.perf_counter() - begin
