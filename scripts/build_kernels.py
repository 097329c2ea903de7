#!/usr/bin/env python
"""Compile the package's C++: the operators, once for each kind of processor, and what shared memory needs.

pip runs this when it installs. Without a compiler nothing is built: the operators do without (`pannier.ops.cpu_isa`
says so), and workers of one host talk over sockets.
"""

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).resolve().parents[1]
OPS = ROOT / "kernels" / "pannier" / "ops"
SHM = ROOT / "common" / "pannier" / "net" / "shm"
BUILDS = OPS / "builds"
FLAGS = ["-std=c++17", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti"]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"]
VNNI = [*AVX512, "-mavx512vnni"]
X86 = {"avx2": AVX2, "avx512": AVX512, "avx512_vnni": VNNI, "avx512_bf16": [*VNNI, "-mavx512bf16"]}


class Library(NamedTuple):
    """One library, and what it is made of."""

    path: Path
    folder: Path
    """All C++ in it."""
    flags: list[str]


def builds() -> dict[str, list[str]]:
    """The operators' builds on this machine: names, as `PANNIER_CPU_ISA` takes them, and compiler flags."""
    return {"generic": [], **(X86 if platform.machine() in ("x86_64", "AMD64") else {})}


def libraries() -> list[Library]:
    """What is built on this machine."""
    kernels = [Library(BUILDS / f"{name}.so", OPS, flags) for name, flags in builds().items()]
    return [*kernels, Library(SHM / "librings.so", SHM, [])]


def compiler() -> str | None:
    """The C++ compiler: what CXX names, or the first that there is."""
    named = os.environ.get("CXX")
    return shutil.which(named) if named else next(filter(None, map(shutil.which, ("g++", "clang++", "c++"))), None)


def build() -> list[Path]:
    """The libraries, made anew where a source is newer; none of those that this compiler can't make."""
    cxx = compiler()
    if cxx is None:
        print("no C++ compiler: operators do without their own kernels, links without shared memory", file=sys.stderr)
        return []
    BUILDS.mkdir(exist_ok=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        built = pool.map(lambda library: _build_one(cxx, library), libraries())
        return [path for path in built if path is not None]


def _build_one(cxx: str, library: Library) -> Path | None:
    target, folder, flags = library
    sources = sorted(folder.rglob("*.cpp"))
    newest = max(path.stat().st_mtime for path in (*sources, *folder.rglob("*.h"), Path(__file__)))
    if target.exists() and target.stat().st_mtime > newest:
        return target
    unfinished = target.with_suffix(f".{os.getpid()}")  # a process may have the present one open
    ran = subprocess.run([cxx, *FLAGS, *flags, *sources, "-o", unfinished], capture_output=True, text=True, check=False)
    if ran.returncode:
        print(f"no {target.name}: {ran.stderr}", file=sys.stderr)
        target.unlink(missing_ok=True)
        return None
    unfinished.replace(target)
    return target


class KernelsHook(BuildHookInterface):  # type: ignore[type-arg]
    """What hatchling calls before it makes a wheel, or an editable one."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
        """Build; a wheel with libraries is for this kind of machine, one without for any."""
        if built := build():
            build_data["artifacts"] += [f"/{path.relative_to(ROOT)}" for path in built]
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"


if __name__ == "__main__":
    for library in build():
        print(library.relative_to(ROOT))
