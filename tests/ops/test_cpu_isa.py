"""Which build is taken, and that one is always said to be missing before it is done without."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from scripts import build_kernels

from pannier.ops import CpuIsa, native

ROOT = Path(__file__).parents[2]
ALL = dict.fromkeys(native.NEEDS)
EVERYTHING = frozenset[str]().union(*native.NEEDS.values())


@pytest.mark.parametrize("name", native.NEEDS)
def test_the_fastest_build_that_the_processor_runs_is_taken(name: str) -> None:
    """One that says just what a build needs gets that one, and hears what the faster ones would need."""
    isa = native.choose(None, native.NEEDS[name], ALL)
    assert isa.name == name
    faster = list(native.NEEDS)[: list(native.NEEDS).index(name)]
    assert all(f"{other}: the processor has no" in isa.reason for other in faster)


def test_a_build_that_does_not_load_is_passed_over() -> None:
    """And the reason says why."""
    assert native.choose(None, EVERYTHING, {**ALL, "avx512_bf16": "not loaded: no such symbol"}) == CpuIsa(
        "avx512_vnni", "avx512_bf16: not loaded: no such symbol"
    )


@pytest.mark.skipif(build_kernels.compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize("function", ["", 'extern "C" int pannier_abi() { return 1; }'])
def test_a_library_of_another_version_is_refused(
    function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that an older program left is not called; the reason says what to do."""
    source, library = tmp_path / "old.cpp", tmp_path / "generic.so"
    source.write_text(function)
    subprocess.run([str(build_kernels.compiler()), "-shared", "-fPIC", source, "-o", library], check=True)
    monkeypatch.setattr(native, "BUILDS", tmp_path)
    there = native.available()
    assert list(there) == ["generic"]
    name, reason = native.choose(None, EVERYTHING, there)
    assert name is None
    assert f"has interface 1, and {native.ABI} is needed: run scripts/build_kernels.py" in reason
    with pytest.raises(ValueError, match=r"run scripts/build_kernels\.py"):
        native.choose("generic", EVERYTHING, there)
    with pytest.raises(OSError, match="has interface 1"):
        native.load("generic", tmp_path)


def test_without_builds_there_is_none_and_a_reason() -> None:
    """As after an installation without a compiler."""
    name, reason = native.choose(None, EVERYTHING, {})
    assert name is None
    assert "no C++ compiler at installation" in reason


def test_the_variable_names_a_build_or_none() -> None:
    """Slower ones too."""
    assert native.choose("generic", EVERYTHING, ALL) == CpuIsa("generic", "PANNIER_CPU_ISA=generic")
    assert native.choose("none", EVERYTHING, ALL) == CpuIsa(None, "PANNIER_CPU_ISA=none")


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("sse9", "known are avx512_bf16, avx512_vnni, avx512, avx2, generic and none"),
        ("avx2", "the processor has no avx2, f16c, fma"),
    ],
)
def test_a_named_build_that_can_not_run_is_refused(named: str, message: str) -> None:
    """Nothing else is taken in its place."""
    with pytest.raises(ValueError, match=message):
        native.choose(named, frozenset(), ALL)


def test_work_goes_to_the_threads_of_torch() -> None:
    """The one OpenMP library in the process is the one that torch brought."""
    torch.ones(1)
    found = native._openmp_libraries()
    assert len(found) == 1
    assert found.pop().startswith(str(Path(torch.__file__).parent))
    assert native.parallel_address() != 0


def test_without_a_compiler_nothing_is_built(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And that is said."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert build_kernels.build() == []
    assert "no C++ compiler" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("has_compiler", [True, False])
def test_a_wheel_holds_what_could_be_compiled(has_compiler: bool, tmp_path: Path) -> None:
    """With libraries it is for this kind of machine, without for any."""
    if has_compiler and build_kernels.compiler() is None:
        pytest.skip("no C++ compiler")
    environment = {} if has_compiler else {"env": {"PATH": ""}}
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path]
    subprocess.run(command, cwd=ROOT, check=True, **environment)  # type: ignore[call-overload]
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl") == (not has_compiler)
    libraries = {Path(name).stem for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")}
    assert libraries == ({each.path.stem for each in build_kernels.libraries()} if has_compiler else set())
