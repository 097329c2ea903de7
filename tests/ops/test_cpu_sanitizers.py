"""The C++ form reads and writes nothing but what it was given, and does nothing that C++ leaves undefined."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from scripts import build_kernels

from pannier.ops import native

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
ALL = dict.fromkeys(native.NEEDS)
FLAGS = ["-std=c++17", "-O0", "-g1", "-fPIC", "-shared", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


def _runtime(compiler: str, name: str) -> str:
    found = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return found.stdout.strip()


@pytest.mark.parametrize(
    "name",
    [
        native.choose(None, native.cpu_flags(), ALL).name or "generic",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("generic", "avx2")),
    ],
)
def test_awkward_shapes_pass_under_the_sanitizers(name: str, tmp_path: Path) -> None:
    """Caches and rows are allocations of their own, so a read behind one is seen; so is an unaligned or wild access."""
    compiler = build_kernels.compiler()
    runtime = _runtime(compiler, "libasan.so") if compiler else ""
    if compiler is None or not Path(runtime).is_absolute():
        pytest.skip("no C++ compiler with sanitizers")
    sources = sorted(build_kernels.OPS.rglob("*.cpp"))
    flags = [*FLAGS, *build_kernels.builds()[name]]
    subprocess.run([compiler, *flags, *sources, "-o", tmp_path / f"{name}.so"], check=True)
    environment = os.environ | {
        "LD_PRELOAD": f"{runtime} {_runtime(compiler, 'libstdc++.so')}",
        "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter's own
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONPATH": str(Path(native.__file__).parents[2]),
    }
    driver = Path(__file__).parent / "sanitized.py"
    ran = subprocess.run(
        [sys.executable, driver, name, tmp_path], env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr[-5000:]
    assert ran.stdout.endswith("all agree\n")
