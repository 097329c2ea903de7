"""Real sockets, and a watch over what a test leaves behind."""

import asyncio
import gc
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import zmq.asyncio

TERM_S = 2.0
RUN_S = 25.0
Run: TypeAlias = Callable[[Coroutine[Any, Any, None]], None]


def terminates(context: "zmq.Context[Any]") -> bool:
    """Whether a context ends, which it only does once its sockets are closed."""
    ending = threading.Thread(target=context.term, name="zmq-term", daemon=True)
    ending.start()
    ending.join(TERM_S)
    return not ending.is_alive()


def _threads() -> set[threading.Thread]:
    """Threads that run, except the one that pyzmq starts once and keeps."""
    return {thread for thread in threading.enumerate() if "GarbageCollector" not in type(thread).__name__}


def _wait_for_threads(threads: set[threading.Thread]) -> None:
    """Those that end with a context are a moment behind it."""
    end = time.monotonic() + TERM_S
    while not _threads() <= threads:
        assert time.monotonic() < end, "the test left a thread running"
        time.sleep(0.001)


def _open_files() -> set[str]:
    names: set[str] = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            names.add(f"{number} {os.readlink(f'/proc/self/fd/{number}')}")
        except FileNotFoundError:  # the listing's own
            continue
    return names


@pytest.fixture
def context() -> Iterator[zmq.asyncio.Context]:
    """A context; the test fails if it leaves a socket open or a thread running."""
    threads, files = _threads(), _open_files()
    context = zmq.asyncio.Context()
    gc.freeze()  # so that collecting looks at what the test makes, and not at all of torch
    yield context
    gc.collect()
    assert terminates(context), "the test left a socket open"
    _wait_for_threads(threads)
    left = {name for name in _open_files() - files if "socket:" in name}
    assert not left, f"the test left sockets of the system open: {left}"


@pytest.fixture
def run() -> Run:
    """Runs a test's coroutine; the test fails if it takes too long or leaves a task behind."""

    def go(body: Coroutine[Any, Any, None]) -> None:
        async def whole() -> None:
            async with asyncio.timeout(RUN_S):
                await body
            await asyncio.sleep(0)  # cancelled tasks end
            left = asyncio.all_tasks() - {asyncio.current_task()}
            assert not left, f"the test left tasks running: {left}"

        asyncio.run(whole())

    return go


@pytest.fixture(params=["tcp", "ipc"])
def endpoint(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where to listen: over each transport in turn."""
    return "tcp://127.0.0.1:0" if request.param == "tcp" else f"ipc://{tmp_path}/s"
