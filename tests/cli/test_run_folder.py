"""The folder of one stack."""

import fcntl
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pannier.cli.run_folder import run_folder


@pytest.fixture(autouse=True)
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a short name: pytest's own are too long for sockets."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)


def test_it_is_private_and_gone_afterwards(base: Path) -> None:
    """Only its user may enter; nothing is left, sockets and files included."""
    with run_folder() as folder:
        assert folder.parent == base
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        (folder / "gateway.toml").write_text("")
    assert list(base.iterdir()) == []


def test_what_a_killed_stack_left_is_removed(base: Path) -> None:
    """The next stack cleans up; a running one keeps its folder."""
    code = (
        "import os, signal\nfrom pannier.cli.run_folder import run_folder\nwith run_folder(): os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code], check=False)
    assert len(list(base.iterdir())) == 1
    with run_folder() as running, run_folder() as other:
        assert {*base.iterdir()} == {running, other}


def test_other_folders_are_left_alone(base: Path) -> None:
    """Without our lock file it is not ours."""
    (base / "pannier-notes").mkdir()
    with run_folder():
        pass
    assert (base / "pannier-notes").is_dir()


def test_a_base_too_long_for_sockets_is_not_used(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = base / ("x" * 80)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    with run_folder() as folder:
        assert len(os.fsencode(folder / "attention-63")) < 107
        assert long not in folder.parents


def test_a_stack_that_starts_beside_another_keeps_its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the other cleans up at the very moment before the folder is locked."""
    flock, others = fcntl.flock, 0

    def late(lock: int, operation: int) -> None:
        nonlocal others
        if operation == fcntl.LOCK_EX and not others:
            others += 1
            with run_folder():
                pass
        flock(lock, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with run_folder() as folder:
        assert others == 1
        assert folder.is_dir()
