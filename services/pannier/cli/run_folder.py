"""A private folder for one stack's sockets and configuration files, gone when the stack is."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PREFIX = "pannier-"
LOCK, UNLOCKED = "lock", "lock.new"
MAX_BASE_BYTES = 64
"""A socket's path has 107 bytes at most, and ours add up to 40."""


@contextmanager
def run_folder() -> Iterator[Path]:
    """A new folder that only this user can enter. Folders that a killed stack left are removed first."""
    base = _base()
    _sweep(base)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
    lock = os.open(folder / UNLOCKED, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.rename(folder / UNLOCKED, folder / LOCK)  # nobody finds it before it is locked
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _base() -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    for base in (runtime, tempfile.gettempdir(), "/tmp"):
        if base and os.access(base, os.W_OK | os.X_OK) and len(os.fsencode(base)) <= MAX_BASE_BYTES:
            return Path(base)
    return Path("/tmp")


def _sweep(base: Path) -> None:
    """Remove our folders whose lock nobody holds."""
    for folder in base.glob(f"{PREFIX}*"):
        try:
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # somebody else's, or just being made
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)
