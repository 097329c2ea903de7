"""What a person sees of the processes of a stack: the newest event of each while it starts, then what is wrong."""

import json
import sys
from types import TracebackType
from typing import Any, Self, TextIO

from rich.console import Console
from rich.status import Status
from rich.text import Text

LOUD = {"warning", "error", "critical"}
UNSHOWN = {"role", "name", "event", "level", "timestamp", "exception"}


class Display:
    """Lines on stderr; on a terminal, progress is one line that changes."""

    def __init__(self, *, verbose: bool = False, stream: TextIO | None = None) -> None:
        self._console = Console(file=stream or sys.stderr, highlight=False, soft_wrap=True)
        self._verbose = verbose
        self._starting = True
        self._status: Status | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._status = self._console.status("starting")
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.ready()

    def ready(self) -> None:
        """The stack has started: progress ends, and from now on only what is wrong is shown."""
        self._starting = False
        if self._status is not None:
            self._status.stop()

    def line(self, child: str, line: str) -> None:
        """One line that a child wrote: an event as JSON, or anything else, which is shown as it is."""
        event = _event(line)
        if event is None:
            self._print(child, line)
        elif event["level"] in LOUD or self._verbose:
            self._print(child, "\n".join(filter(None, (_sentence(event), event.get("exception")))))
        elif self._starting:
            self._progress(child, _sentence(event))

    def _progress(self, child: str, sentence: str) -> None:
        if self._status is not None:
            self._status.update(Text(f"{child}: {sentence}"))
        else:
            self._print(child, sentence)

    def _print(self, child: str, text: str) -> None:
        for line in text.splitlines():
            self._console.print(Text(f"{child}: {line}"))


def _event(line: str) -> dict[str, Any] | None:
    if not line.startswith("{"):
        return None
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if {"event", "level"} <= event.keys() else None


def _sentence(event: dict[str, Any]) -> str:
    fields = {name: value for name, value in event.items() if name not in UNSHOWN}
    if len(fields) == 1:
        return f"{event['event']}: {next(iter(fields.values()))}"
    return ", ".join([event["event"], *(f"{name}={value}" for name, value in fields.items())])
