"""The C++ operators on a processor that this machine hasn't got: 64-bit Arm, emulated."""

import shutil
import subprocess
from pathlib import Path

import pytest
from scripts import build_kernels

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(300)]
FOLDER = Path(__file__).parent / "cross"
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
FLAGS = [flag for flag in build_kernels.FLAGS if flag not in ("-shared", "-fPIC")]


@pytest.fixture(scope="module", autouse=True)
def _tools() -> None:
    for tool in (COMPILER, EMULATOR):
        if shutil.which(tool) is None:
            pytest.skip(f"no {tool}; Debian has it in g++-aarch64-linux-gnu and qemu-user")


@pytest.mark.parametrize("name", ["chunk", "paged"])
def test_the_generic_build_is_right_on_arm(name: str, tmp_path: Path) -> None:
    """Its vectors are NEON's there. Awkward shapes of fp32, bf16 and fp16 agree with the definition, to 1e-5."""
    program = tmp_path / name
    subprocess.run([COMPILER, *FLAGS, "-static", FOLDER / f"{name}.cpp", "-o", program], check=True)
    ran = subprocess.run([EMULATOR, program], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_all_of_it_compiles_for_arm(tmp_path: Path) -> None:
    """Into the library that an installation there makes, of position-independent code."""
    sources = sorted(build_kernels.OPS.rglob("*.cpp"))
    library = tmp_path / "generic.so"
    subprocess.run([COMPILER, *build_kernels.FLAGS, *sources, "-o", library], check=True)
    assert library.exists()
