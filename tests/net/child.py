"""Processes that tests start and kill."""

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any


@contextmanager
def child(run: Any, *args: Any) -> Iterator[tuple[BaseProcess, Connection]]:
    """A process that runs `run` with one end of a pipe, and the other end of it; it is killed in the end."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=run, args=(theirs, *args))
    process.start()
    try:
        yield process, ours
    finally:
        process.kill()
        process.join()
        ours.close()
        theirs.close()
