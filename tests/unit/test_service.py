"""The four verbs, signals and exit codes of a process."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from pannier.runtime.errors import ModelError
from pannier.runtime.service import in_thread, run_service


class Recorded:
    """A service that writes down what happens to it; `run` lasts until it is told to stop."""

    role = "compute"
    name = "c0"

    def __init__(self) -> None:
        self.verbs: list[str] = []

    async def startup(self) -> None:
        self.verbs.append("startup")

    async def run(self) -> None:
        self.verbs.append("run")
        await asyncio.Event().wait()

    async def drain(self) -> None:
        self.verbs.append("drain")

    async def close(self) -> None:
        self.verbs.append("close")


class StopsItself(Recorded):
    """Sends itself a signal as soon as it runs, and another as soon as it drains."""

    def __init__(self, first: signal.Signals, second: signal.Signals | None = None) -> None:
        super().__init__()
        self.first, self.second = first, second

    async def run(self) -> None:
        os.kill(os.getpid(), self.first)
        await super().run()

    async def drain(self) -> None:
        await super().drain()
        if self.second is not None:
            os.kill(os.getpid(), self.second)
            await asyncio.Event().wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_closes(number: signal.Signals) -> None:
    service = StopsItself(number)
    assert run_service(service) == 0
    assert service.verbs == ["startup", "run", "drain", "close"]


def test_a_second_signal_forces() -> None:
    """A drain that would last for ever is cut, and the exit code says by what; `close` is called all the same."""
    service = StopsItself(signal.SIGINT, signal.SIGTERM)
    assert run_service(service) == 128 + signal.SIGTERM
    assert service.verbs == ["startup", "run", "drain", "close"]


def test_a_service_that_is_done_is_closed() -> None:
    class Done(Recorded):
        async def run(self) -> None:
            self.verbs.append("run")

    service = Done()
    assert run_service(service) == 0
    assert service.verbs == ["startup", "run", "close"]


def test_an_error_of_ours_is_the_last_line(capfd: pytest.CaptureFixture[str]) -> None:
    """One sentence with role and name, no traceback."""

    class Refused(Recorded):
        async def startup(self) -> None:
            raise ModelError("bert: has no decoder")

    service = Refused()
    assert run_service(service) == 1
    assert service.verbs == ["close"]
    assert capfd.readouterr().err == "pannier: compute c0: bert: has no decoder\n"


def test_a_defect_has_another_exit_code(capfd: pytest.CaptureFixture[str]) -> None:
    """Its last line still says what it was."""

    class Broken(Recorded):
        async def run(self) -> None:
            raise KeyError("lane")

    assert run_service(Broken()) == 70
    assert capfd.readouterr().err.splitlines()[-1] == "pannier: compute c0: KeyError: 'lane'"


def test_an_error_during_drain_is_not_lost(capfd: pytest.CaptureFixture[str]) -> None:
    class BreaksInDrain(StopsItself):
        async def drain(self) -> None:
            raise ModelError("gone")

    assert run_service(BreaksInDrain(signal.SIGTERM)) == 1
    assert "gone" in capfd.readouterr().err


def test_a_result_comes_back_from_a_thread() -> None:
    """And so does an error."""

    async def both() -> None:
        assert await in_thread(divmod, 7, 2) == (3, 1)
        with pytest.raises(ZeroDivisionError):
            await in_thread(divmod, 7, 0)

    asyncio.run(both())


def test_the_loop_goes_on_while_a_thread_works() -> None:
    async def release() -> bool:
        gate = threading.Event()
        waiting = asyncio.create_task(in_thread(gate.wait, 10.0))
        await asyncio.sleep(0)
        gate.set()
        return await waiting

    assert asyncio.run(release())


SLOW_LOAD = """
import os, signal, time
from pannier.runtime.service import in_thread, run_service

class Loads:
    role = name = "compute"
    async def startup(self):
        def load():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)
        await in_thread(load)
    async def run(self): ...
    async def drain(self): ...
    async def close(self): print("closed", flush=True)

raise SystemExit(run_service(Loads()))
"""


@pytest.mark.timeout(30)
def test_a_signal_ends_a_long_load_at_once() -> None:
    """Blocking work that can't be interrupted doesn't hold the process."""
    begin = time.monotonic()
    ended = subprocess.run([sys.executable, "-c", SLOW_LOAD], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "closed\n", "")
    assert time.monotonic() - begin < 20
