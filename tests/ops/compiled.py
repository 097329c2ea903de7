"""Compiles the Triton kernels for a GPU that needn't be there, as they would be launched on it.

`python -m tests.ops.compiled 75` prints, as JSON, what each of them takes. A process of its own: in the tests' one the
kernels are interpreted.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pannier.ops import PagedBatch, PagedSegment
from pannier.ops.chunk_attention import triton as chunk_attention
from pannier.ops.merge_partials import triton as merge_partials
from pannier.ops.paged_attention import triton as paged_attention
from pannier.ops.store_kv import triton as store_kv
from pannier.ops.triton_device import Gpu, gpu_with

POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
    torch.int8: "*i8",
}
OPTIONS = ("num_warps",)
DTYPES = (
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.int8),
    (torch.bfloat16, torch.float8_e4m3fn),
)
"""Rows, and what is kept of them."""
SIZES = ((128, 128, 8), (64, 64, 1), (256, 256, 2), (192, 128, 1), (80, 80, 3))
"""Keys, values, query heads of a KV head."""


@dataclass(frozen=True)
class Compiled:
    """One kernel for one device."""

    case: str
    shared: int
    """Bytes of shared memory."""
    stack: int
    """Bytes that a thread spills."""
    tensor_cores: bool


class Compiler:
    """Takes a kernel's place: compiles what is launched, and launches nothing."""

    def __init__(self, kernel: Any, capability: int, found: list[Compiled]) -> None:
        self._kernel, self._capability, self._found = kernel, capability, found
        self.case = ""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._compile

    def _compile(self, *args: Any, **kwargs: Any) -> None:
        options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
        values = dict(zip(self._kernel.arg_names, args, strict=False)) | kwargs
        types = {name: _type(value, constant=name in kwargs) for name, value in values.items()}
        source = ASTSource(
            fn=self._kernel,
            signature={name: types[name] for name in self._kernel.arg_names},
            constexprs={name: value for name, value in values.items() if types[name] == "constexpr"},
            attrs={
                (number,): [["tt.divisibility", 16]]
                for number, name in enumerate(self._kernel.arg_names)
                if types[name] != "constexpr" and _is_divisible(values[name])
            },
        )
        built = triton.compile(source, target=GPUTarget("cuda", self._capability, 32), options=options)
        operator = self._kernel.__module__.split(".")[-2]
        case = f"{operator}.{self._kernel.__name__} {self.case}, tiles of {kwargs.get('tile_pairs', '-')} pairs"
        ptx = built.asm["ptx"]
        self._found.append(
            Compiled(case, built.metadata.shared, _stack(built.asm["cubin"]), "mma.sync" in ptx or "wgmma" in ptx)
        )


def _type(value: Any, *, constant: bool) -> str:
    """As Triton types an argument; None and an integer that is 1 are constants for it."""
    if isinstance(value, Tensor):
        return POINTERS[value.dtype]
    if constant or value is None or value == 1:
        return "constexpr"
    return "fp32" if isinstance(value, float) else "i32"


def _is_divisible(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0)


def _stack(cubin: bytes) -> int:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        tool = triton.knobs.nvidia.cuobjdump.path
        said = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    return int(said.split("STACK:")[1].split()[0])


def compile_all(capability: int) -> list[Compiled]:
    """Every kernel in the forms that are launched for typical heads and dtypes."""
    found: list[Compiled] = []
    gpu = gpu_with((capability // 10, capability % 10), processors=40)
    kernels = (
        (paged_attention, "attend"),
        (paged_attention, "merge"),
        (chunk_attention, "attend"),
        (merge_partials, "merge"),
        (store_kv, "store"),
    )
    compilers = [Compiler(getattr(module, name), capability, found) for module, name in kernels]
    for (module, name), compiler in zip(kernels, compilers, strict=True):
        setattr(module, name, compiler)
    for dtype, kept in DTYPES:
        for sizes in SIZES if dtype == kept == torch.bfloat16 else SIZES[:1]:
            for compiler in compilers:
                compiler.case = f"{dtype} over {kept} {sizes}".replace("torch.", "")
            _launch_all(gpu, dtype, kept, *sizes)
    return found


def _launch_all(gpu: Gpu, dtype: torch.dtype, kept: torch.dtype, k_size: int, v_size: int, heads_per_kv: int) -> None:
    kv_heads, block_size, rows = 2, 16, 65
    keys = torch.zeros(64, kv_heads, block_size, k_size, dtype=kept)
    values = torch.zeros(64, kv_heads, block_size, v_size, dtype=kept)
    scales = (torch.zeros(64, kv_heads, block_size),) * 2 if kept.itemsize == 1 else None
    q = torch.zeros(rows, kv_heads * heads_per_kv, k_size, dtype=dtype)
    k, v = q[:, :kv_heads], torch.zeros(rows, kv_heads, v_size, dtype=dtype)
    blocks = range(64)
    segments = [PagedSegment(blocks, 1000, 0, 999, 1), PagedSegment(blocks, 1000, 0, 1000, rows - 1)]
    batch = PagedBatch.build(segments, "cpu")
    o, lse = paged_attention.attend_on(gpu, q, keys, values, batch, 0.1, 0, 0.0, scales)
    chunk_attention.attend_on(gpu, q, k, v, [rows], 0.1, 0, 0.0)
    merge_partials.merge_partials(o, lse, o.to(dtype), lse)
    merge_partials.merge_sinks(o.to(dtype), lse, lse[0])
    store_kv.store_kv(keys, values, torch.arange(rows), k, v, scales)


if __name__ == "__main__":
    json.dump([asdict(one) for one in compile_all(int(sys.argv[1]))], sys.stdout)
