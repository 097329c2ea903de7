"""The data thread of a worker: plain blocking code beside the asyncio control plane."""

import asyncio
import socket
import threading
from concurrent.futures import Future
from typing import Protocol


class StopSignal:
    """A flag that also wakes a poller: readable once it is set."""

    def __init__(self) -> None:
        self._flag = threading.Event()
        self._reader, self._writer = socket.socketpair()

    def set(self) -> None:
        """Ask for the end; may be called from any thread, and again."""
        if not self._flag.is_set():
            self._flag.set()
            self._writer.send(b"\0")

    def is_set(self) -> bool:
        """Whether the end was asked for."""
        return self._flag.is_set()

    def fileno(self) -> int:
        """What a poller watches."""
        return self._reader.fileno()

    def close(self) -> None:
        """Close both ends."""
        self._reader.close()
        self._writer.close()


class Loop(Protocol):
    """What a data thread runs: blocking until the signal is set; it closes what it opened."""

    def __call__(self, stop: StopSignal) -> None:
        """Work until `stop` is set."""


class DataThread:
    """Runs a loop in a thread of its own; its end, good or bad, can be awaited."""

    def __init__(self, name: str, loop: Loop) -> None:
        self._stop = StopSignal()
        self._done: Future[None] = Future()
        self._loop = loop
        self._thread = threading.Thread(target=self._run, name=name)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    async def wait(self) -> None:
        """Wait for the end of the loop. Raises what the loop raised."""
        await asyncio.shield(asyncio.wrap_future(self._done))

    def stop(self) -> None:
        """Ask the loop to end and wait for the thread."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._stop.close()

    def _run(self) -> None:
        try:
            self._loop(self._stop)
        except BaseException as error:  # noqa: BLE001  # handed to whoever awaits the thread
            self._done.set_exception(error)
        else:
            self._done.set_result(None)
