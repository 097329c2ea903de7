"""Child processes that live and end together. What they are for is not known here.

Each child's stdin is a pipe from this process: it reaches its end when this process dies, however it dies, and the
child then ends itself (`pannier.cli.supervised`). Its stdout and stderr come here, line by line.
"""

import asyncio
import os
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from pannier.runtime.errors import PannierError

FORCE_S = 5.0
"""How long a child may take to leave after the second request."""
LAST_WORDS = "pannier: "
"""What a line starts with in which a child says why it ends."""


class ChildEnded(PannierError):
    """Raised when a child has ended by itself; the text says which and why."""


@dataclass(frozen=True)
class Command:
    """One child to start. Children of a lower rank are stopped first."""

    name: str
    arguments: Sequence[str]
    rank: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)


Show = Callable[[str, str], None]
"""Takes a child's name and one line that it wrote."""


class Children:
    """All children, as a context: they are started on entering, and none is left on leaving."""

    def __init__(self, commands: Iterable[Command], show: Show, drain_s: float) -> None:
        self._children = [Child(command, show) for command in commands]
        self.drain_s = drain_s
        """How long each rank may finish its work when stopped."""

    async def __aenter__(self) -> Self:
        try:
            for child in self._children:
                await child.start()
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()

    def pid(self, name: str) -> int:
        """The process id of a child."""
        return next(child.pid for child in self._children if child.command.name == name)

    async def first_end(self) -> None:
        """Wait until any child ends, which none should. Raises `ChildEnded`."""
        waiting = {asyncio.create_task(child.wait()): child for child in self._children}
        try:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()
        ended = [waiting[task] for task in done]
        # Where several ended at once, the one that failed is the cause.
        raise ChildEnded(next((child for child in ended if child.failed), ended[0]).why())

    def kill(self) -> None:
        """End all children now."""
        for child in self._children:
            child.signal(signal.SIGKILL)

    async def _stop(self) -> None:
        for rank in sorted({child.command.rank for child in self._children}):
            leaving = [child for child in self._children if child.command.rank == rank]
            await asyncio.gather(*(child.stop(self.drain_s) for child in leaving))


class Child:
    """One child process and what it wrote last."""

    def __init__(self, command: Command, show: Show) -> None:
        self.command = command
        self._show = show
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._last_line = ""
        self._last_words = ""

    async def start(self) -> None:
        """Start the process. It gets a session of its own, so that a Ctrl-C is this process's to pass on."""
        self._process = await asyncio.create_subprocess_exec(
            *self.command.arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, **self.command.environment},
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self._reading = asyncio.create_task(self._read(self._process.stdout))

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process is not None
        return self._process.pid

    @property
    def failed(self) -> bool:
        """Whether it ended with anything but exit code 0."""
        return self._process is not None and self._process.returncode not in (None, 0)

    async def wait(self) -> None:
        """Wait for its end and for the last line that it wrote."""
        if self._process is not None and self._reading is not None:
            await self._process.wait()
            await asyncio.wait((self._reading,), timeout=1.0)  # a grandchild may still hold the pipe

    def why(self) -> str:
        """Why it ended, in one sentence."""
        code = self._process.returncode if self._process is not None else None
        if self._last_words:
            return self._last_words
        if code is not None and code < 0:
            return f"{self.command.name} was ended by {signal.Signals(-code).name}"
        said = f"; it last wrote: {self._last_line}" if self._last_line else ""
        return f"{self.command.name} ended by itself with exit code {code}{said}"

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, if it still runs."""
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def stop(self, drain_s: float) -> None:
        """Ask it to finish, then to leave, then end it."""
        for number, patience_s in ((signal.SIGTERM, drain_s), (signal.SIGTERM, FORCE_S), (signal.SIGKILL, None)):
            self.signal(number)
            with suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    await self.wait()
                    return

    async def _read(self, stream: asyncio.StreamReader) -> None:
        rest = b""
        while chunk := await stream.read(1 << 16):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self._line(line)
        self._line(rest)

    def _line(self, raw: bytes) -> None:
        if line := raw.decode(errors="replace").rstrip():
            self._last_line = line
            if line.startswith(LAST_WORDS):
                self._last_words = line.removeprefix(LAST_WORDS)
            else:
                self._show(self.command.name, line)
