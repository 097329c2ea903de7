"""The operators' C++, in the build that suits this processor.

`scripts/build_kernels.py` compiles one source several times; which build is taken is decided once, from what the
processor says. PANNIER_CPU_ISA names another one, or `none`.
"""

import ctypes
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

ISA_VARIABLE = "PANNIER_CPU_ISA"
BUILDS = Path(__file__).parent / "builds"
AVX2 = frozenset({"avx2", "fma", "f16c"})
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
VNNI = AVX512 | {"avx512_vnni"}
NEEDS = {
    "avx512_bf16": VNNI | {"avx512_bf16"},
    "avx512_vnni": VNNI,
    "avx512": AVX512,
    "avx2": AVX2,
    "generic": frozenset[str](),
}
"""Builds, the fastest first, and what the processor must have."""

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""As `vector.h` numbers them."""

STORED_DTYPES = {**DTYPES, torch.int8: 3, torch.float8_e4m3fn: 4}
"""What keys and values are stored in; the last two have scales."""

ABI = 3
"""What is said to the libraries, and how; as in `vector.h`. It changes with the functions' arguments and tables."""


class CpuIsa(NamedTuple):
    """Which form the operators take on CPU, and why."""

    name: str | None
    """The build; None when there is none and torch's operators are put together instead, several times as slow."""
    reason: str


class Library(NamedTuple):
    """A build's functions."""

    name: str
    paged_attention: Any
    store_kv: Any
    chunk_attention: Any
    read_stream: Any
    parallel: int
    """Address of the function that runs work on torch's threads; 0 where it wasn't found."""


@cache
def cpu_isa() -> CpuIsa:
    """The build in use in this process."""
    return choose(os.environ.get(ISA_VARIABLE), cpu_flags(), available())


@cache
def library() -> Library | None:
    """The functions of that build; None when there is none."""
    name = cpu_isa().name
    return None if name is None else load(name)


def choose(named: str | None, flags: frozenset[str], there: Mapping[str, str | None]) -> CpuIsa:
    """The named build or the fastest one that this processor runs; `there` has each build and what is wrong with it.

    Raises ValueError when the named one doesn't exist or can't run.
    """
    if named == "none":
        return CpuIsa(None, f"{ISA_VARIABLE}=none")
    if named:
        if named not in NEEDS:
            raise ValueError(f"{ISA_VARIABLE} is {named!r}; known are {', '.join(NEEDS)} and none")
        if problem := _problem(named, flags, there):
            raise ValueError(f"{ISA_VARIABLE} is {named!r}, {problem}")
        return CpuIsa(named, f"{ISA_VARIABLE}={named}")
    problems = {name: _problem(name, flags, there) for name in NEEDS}
    for name, problem in problems.items():
        if problem is None:
            faster = [f"{other}: {why}" for other, why in problems.items() if why][: list(NEEDS).index(name)]
            return CpuIsa(name, "; ".join(faster) or "the fastest there is")
    return CpuIsa(None, f"no build can be used: {problems['generic']}")


def _problem(name: str, flags: frozenset[str], there: Mapping[str, str | None]) -> str | None:
    if missing := NEEDS[name] - flags:
        return f"the processor has no {', '.join(sorted(missing))}"
    if name not in there:
        return "not built, as when there was no C++ compiler at installation"
    return there[name]


def cpu_flags() -> frozenset[str]:
    """What the processor says it has; nothing where it isn't said in these words."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.split(":")[1].split() for line in lines if line.startswith("flags")), ()))


def available() -> dict[str, str | None]:
    """The builds that were made; None, or why one can't be loaded."""
    return {name: _loading_problem(name) for name in NEEDS if (BUILDS / f"{name}.so").exists()}


def _loading_problem(name: str) -> str | None:
    try:
        _open(BUILDS / f"{name}.so")
    except OSError as error:
        return f"not loaded: {error}"
    return None


def _open(path: Path) -> ctypes.CDLL:
    """A build, if it is of this version. Raises OSError."""
    loaded = ctypes.CDLL(str(path))
    abi = loaded.pannier_abi() if hasattr(loaded, "pannier_abi") else 1
    if abi != ABI:
        raise OSError(f"{path} has interface {abi}, and {ABI} is needed: run scripts/build_kernels.py")
    return loaded


def load(name: str, folder: Path = BUILDS) -> Library:
    """The functions of a build. Raises OSError when it can't be loaded or is of another version."""
    loaded = _open(folder / f"{name}.so")
    pointer, number, small = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    attention = loaded.pannier_paged_attention
    attention.argtypes, attention.restype = [pointer] * 8, None
    store = loaded.pannier_store_kv
    rows: list[Any] = [pointer, number, pointer, number, number]  # where to, size, where from, strides
    store.argtypes = [pointer, small, small, small, pointer, number, number, number, number, *rows, *rows]
    store.argtypes += [pointer, pointer]  # scales
    store.restype = small
    chunk = loaded.pannier_chunk_attention
    chunk.argtypes, chunk.restype = [pointer], None
    stream = loaded.pannier_read_stream
    stream.argtypes, stream.restype = [pointer, small, pointer, number], ctypes.c_uint32
    return Library(name, attention, store, chunk, stream, parallel_address())


@cache
def parallel_address() -> int:
    """Where GOMP_parallel of the OpenMP library that torch uses is: its threads are there anyway.

    torch brings a copy under a name of its own; another copy would have threads of its own, which spin for work.
    """
    folder = str(Path(torch.__file__).parent)
    for path in sorted(_openmp_libraries(), key=lambda path: not path.startswith(folder)):
        function = getattr(ctypes.CDLL(path), "GOMP_parallel", None)
        if function is not None:
            return ctypes.cast(function, ctypes.c_void_p).value or 0
    return 0


def _openmp_libraries() -> set[str]:
    """Paths of those in this process."""
    with open("/proc/self/maps") as maps:
        paths = {line.split(maxsplit=5)[-1].strip() for line in maps}
    return {path for path in paths if Path(path).name.startswith(("libgomp", "libomp", "libiomp"))}
