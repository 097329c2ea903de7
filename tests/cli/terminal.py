"""Commands as a person types them, in real processes that can be found and counted."""

import os
import select
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

PANNIER = [sys.executable, "-m", "pannier.cli"]
MARK = "PANNIER_TEST_MARK"


@dataclass
class Terminal:
    """Where a person types commands: own run folders and slices, and a mark by which every process is found."""

    run: Path
    cache: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def endpoint(self) -> str:
        """A socket of its own, so that no two tests want one port."""
        return f"ipc://{self.run}/c"

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {
            MARK: self.mark,
            "XDG_RUNTIME_DIR": str(self.run),
            "XDG_CACHE_HOME": str(self.cache),
            "PANNIER_ENDPOINT": self.endpoint,
        }

    def call(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A command that ends by itself."""
        command = [*PANNIER, *arguments]
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)

    @contextmanager
    def start(self, *arguments: str) -> Iterator["Started"]:
        """A command in the foreground, which is killed if the test leaves it there."""
        with subprocess.Popen(
            [*PANNIER, *arguments],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            assert process.stdout is not None
            try:
                yield Started(process, process.stdout)
            finally:
                process.kill()

    def processes(self) -> dict[int, str]:
        """Processes that bear the mark and run, with their command lines."""
        return {
            int(folder.name): command for folder in Path("/proc").glob("[0-9]*") if (command := self._command(folder))
        }

    def _command(self, folder: Path) -> str:
        try:
            if f"{MARK}={self.mark}".encode() in (folder / "environ").read_bytes():
                return (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:  # it has ended
            pass
        return ""

    def left(self) -> list[str]:
        """Everything that a command has left behind: processes, sockets, folders."""
        return [*self.processes().values(), *(str(path) for path in self.run.rglob("*"))]


@dataclass
class Started:
    """A command that runs."""

    process: subprocess.Popen[str]
    output: IO[str]
    lines: list[str] = field(default_factory=list)

    def read_until(self, text: str) -> None:
        """Wait for a line with this text."""
        for line in self.output:
            self.lines.append(line.rstrip("\n"))
            if text in line:
                return
        raise AssertionError(f"{text!r} was never printed; there was {self.lines}")

    def press_ctrl_c(self) -> None:
        """As a terminal does: to the whole foreground process group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def end(self) -> int:
        """Read to the end; the exit code."""
        self.lines += self.output.read().splitlines()
        return self.process.wait()


def is_alive(pid: int) -> bool:
    """Whether it runs; one that has ended and that nobody has waited for doesn't."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for_end(pid: int) -> None:
    """Wait for a process that is nobody's child any more, 20 s at most."""
    with suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        select.select([descriptor], [], [], 20)
        os.close(descriptor)
