"""The life of a process: startup, run, drain, close, and an exit code that says why it ended.

====  ==========================================================
0     done, or asked to stop (SIGTERM, SIGINT) and drained
1     an error that the last line of stderr says in one sentence
70    a defect; the traceback is in the log
130   SIGINT twice: not drained (SIGTERM: 143)
====  ==========================================================
"""

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

import structlog

from pannier.net import NetError
from pannier.runtime.errors import PannierError
from pannier.runtime.signals import StopRequests

T = TypeVar("T")
DRAIN_S = 30.0
CLOSE_S = 10.0
DEFECT = 70
log = structlog.get_logger()


class Service(Protocol):
    """One process of the stack. `close` is called exactly once, however far the others came."""

    @property
    def role(self) -> str:
        """Gateway, compute or attention."""

    @property
    def name(self) -> str:
        """Which of its role it is."""

    async def startup(self) -> None:
        """Get ready. Long blocking work belongs in `in_thread`, else no signal is heard."""

    async def run(self) -> None:
        """Work until there is nothing more to do; cancelled after `drain`."""

    async def drain(self) -> None:
        """Take nothing new and finish what is there, while `run` goes on."""

    async def close(self) -> None:
        """Give back sockets, threads and memory."""


def run_service(service: Service) -> int:
    """Run a service to its end on uvloop, where that exists, and return the process's exit code."""
    with asyncio.Runner(loop_factory=_new_event_loop) as runner:
        code = runner.run(_live(service))
    if any(thread.is_alive() for thread in _abandoned):
        # It is deep in a load that can't be interrupted; waiting for it would take as long as the load.
        sys.stderr.flush()
        os._exit(code)
    return code


async def in_thread(function: Callable[..., T], *args: Any) -> T:
    """The result of blocking work. When cancelled, the work is abandoned and ends with the process."""
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()

    def work() -> None:
        try:
            result = function(*args)
        except BaseException as error:  # noqa: BLE001  # handed to whoever awaits the result
            done.set_exception(error)
        else:
            done.set_result(result)

    thread = threading.Thread(target=work, name=getattr(function, "__name__", "work"), daemon=True)
    thread.start()
    try:
        return await asyncio.wrap_future(done)
    except asyncio.CancelledError:
        _abandoned.append(thread)
        raise


_abandoned: list[threading.Thread] = []


def _new_event_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop  # optional: it doesn't exist for every platform
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


async def _live(service: Service) -> int:
    signals = StopRequests()
    try:
        try:
            return await _start_and_run(service, signals)
        finally:
            async with asyncio.timeout(CLOSE_S):
                await service.close()
    except (PannierError, NetError) as error:
        log.debug("failed", exc_info=True)
        _last_words(service, str(error))
        return 1
    except Exception as error:
        log.exception("defect")
        _last_words(service, f"{type(error).__name__}: {error}")
        return DEFECT


def _last_words(service: Service, reason: str) -> None:
    """What `pannier serve` shows of a process that ended."""
    who = service.role if service.name == service.role else f"{service.role} {service.name}"
    print(f"pannier: {who}: {reason}", file=sys.stderr, flush=True)  # noqa: T201


async def _start_and_run(service: Service, signals: StopRequests) -> int:
    if await _until(service.startup(), signals.first):
        return 0
    running = asyncio.create_task(service.run())
    try:
        await asyncio.wait((running, signals.first), return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            await running
            return 0
        return await _drain(service, running, signals)
    finally:
        await _cancel(running)


async def _drain(service: Service, running: asyncio.Task[None], signals: StopRequests) -> int:
    log.info("draining", signal=signals.first.result().name, deadline_s=DRAIN_S)
    draining = asyncio.create_task(service.drain())
    try:
        await asyncio.wait((draining, running, signals.second), timeout=DRAIN_S, return_when=asyncio.FIRST_COMPLETED)
        for task in (running, draining):
            if task.done():
                await task
        if signals.second.done():
            return 128 + signals.second.result()
        if not draining.done() and not running.done():
            log.warning("not drained in time", deadline_s=DRAIN_S)
        return 0
    finally:
        await _cancel(draining)


async def _until(work: Coroutine[Any, Any, None], stop: asyncio.Future[signal.Signals]) -> bool:
    """Do the work, or drop it when `stop` comes first; whether it was dropped."""
    task = asyncio.create_task(work)
    try:
        await asyncio.wait((task, stop), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await task
        return stop.done()
    finally:
        await _cancel(task)


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait((task,))
