"""What no source of the project may do."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [path for folder in ("services", "common", "kernels", "scripts") for path in (ROOT / folder).rglob("*.py")]
RUNS_WHAT_IT_READS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
CALLS = {"recv_pyobj", "send_pyobj", "recv_serialized", "send_serialized"}


def faults(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        names: list[str] = []
        line = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *[f"{node.module}.{alias.name}" for alias in node.names]]
        if any(RUNS_WHAT_IT_READS & set(name.split(".")) for name in names):
            yield f"{line} imports {names}"
        if isinstance(node, ast.Attribute) and node.attr in CALLS:
            yield f"{line} uses {node.attr}"


@pytest.mark.timeout(30)
def test_no_pickle_anywhere() -> None:
    """No module imports a format that runs what it reads, or has ZeroMQ pickle for it."""
    assert len(SOURCES) > 50
    assert [fault for path in SOURCES for fault in faults(path)] == []


def test_the_check_finds_what_it_looks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way to use pickle is found."""
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    spoilt = tmp_path / "spoilt.py"
    spoilt.write_text(
        "import os, pickle\nfrom multiprocessing import pickle as p\nfrom dill import dumps\ns.recv_pyobj()"
    )
    assert [fault.split(" ")[0] for fault in faults(spoilt)] == [f"spoilt.py:{line}" for line in (1, 2, 3, 4)]


@pytest.mark.slow
@pytest.mark.timeout(30)
@pytest.mark.parametrize("package", ["wire", "net", "client", "scheduler"])
def test_imports_no_torch(package: str) -> None:
    """What a client needs, and the scheduler, import neither torch nor numpy, not even by way of others."""
    code = f"import sys, pannier.{package}; print([m for m in ('torch', 'numpy', 'transformers') if m in sys.modules])"
    roots = ":".join(str(ROOT / folder) for folder in ("services", "common", "kernels"))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": roots}
    )
    assert done.stdout.strip() == "[]"
