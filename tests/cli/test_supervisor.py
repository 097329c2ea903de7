"""Children live and end together, and say why."""

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pannier.cli.supervisor import ChildEnded, Children, Command
from tests.cli.terminal import is_alive, wait_for_end

pytestmark = pytest.mark.timeout(30)

SLEEPS = "import signal; print('up', flush=True); signal.pause()"
SAYS_WHY = "import sys; print('busy'); sys.exit('pannier: compute c0: the model is a bert')"
IGNORES_SIGTERM = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEPS}"
FOLLOWS = "from pannier.cli.supervised import follow_supervisor; follow_supervisor(); " + SLEEPS


class Lines:
    """What children wrote, and a way to wait until one has written something."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []
        self._arrived = asyncio.Event()

    def __call__(self, name: str, line: str) -> None:
        self.seen.append((name, line))
        self._arrived.set()

    async def has(self, name: str, line: str) -> None:
        while (name, line) not in self.seen:
            self._arrived.clear()
            await self._arrived.wait()


def child(name: str, code: str, rank: int = 0) -> Command:
    return Command(name, [sys.executable, "-c", code], rank)


def test_none_is_left_on_leaving() -> None:
    """Whatever the children do, and also when the body fails."""

    pids = []

    async def run() -> None:
        lines = Lines()
        async with Children([child("a", SLEEPS), child("b", SLEEPS, rank=1)], lines, drain_s=10) as children:
            pids.extend([children.pid("a"), children.pid("b")])
            await lines.has("a", "up")
            await lines.has("b", "up")
            raise KeyError

    with pytest.raises(KeyError):
        asyncio.run(run())
    assert len(pids) == 2
    assert not any(map(is_alive, pids))


def test_one_that_does_not_listen_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM twice, then SIGKILL."""
    monkeypatch.setattr("pannier.cli.supervisor.FORCE_S", 0.1)

    async def run() -> int:
        lines = Lines()
        async with Children([child("a", IGNORES_SIGTERM)], lines, drain_s=0.1) as children:
            await lines.has("a", "up")
            return children.pid("a")

    assert not is_alive(asyncio.run(run()))


def test_lower_ranks_are_stopped_first(tmp_path: Path) -> None:
    """The gateway can still use its workers while it drains."""
    record = tmp_path / "order"

    def code(name: str) -> str:
        note = f"open({str(record)!r}, 'a').write({name!r})"
        return f"import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit({note} and 0)); {SLEEPS}"

    async def run() -> None:
        lines = Lines()
        async with Children([child("w", code("w"), rank=1), child("g", code("g"), rank=0)], lines, drain_s=10):
            await lines.has("w", "up")
            await lines.has("g", "up")

    asyncio.run(run())
    assert record.read_text() == "gw"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (SAYS_WHY, "compute c0: the model is a bert"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "b was ended by SIGKILL"),
        ("print('last thing'); raise SystemExit(3)", "b ended by itself with exit code 3; it last wrote: last thing"),
    ],
    ids=["last words", "signal", "exit code"],
)
def test_the_first_to_end_says_why(code: str, reason: str) -> None:
    """In its own last words where it has any."""

    async def run() -> None:
        async with Children([child("a", SLEEPS), child("b", code)], Lines(), drain_s=10) as children:
            await children.first_end()

    with pytest.raises(ChildEnded) as caught:
        asyncio.run(run())
    assert str(caught.value) == reason


def test_long_and_undecodable_output_is_read() -> None:
    """A line longer than any buffer, and bytes that are no text, block nobody."""
    code = "import sys; sys.stdout.buffer.write(b'x' * 300_000 + b'\\xff\\nend')"

    async def run() -> list[tuple[str, str]]:
        lines = Lines()
        with pytest.raises(ChildEnded):
            async with Children([child("a", code)], lines, drain_s=10) as children:
                await children.first_end()
        return lines.seen

    assert [line for _, line in asyncio.run(run())] == ["x" * 300_000 + "\ufffd", "end"]


SUPERVISES = f"""
import asyncio, os, sys
from pannier.cli.supervisor import Children, Command

def show(name, line):
    print(children.pid("a"), line, flush=True)

async def main():
    async with children:
        await asyncio.Event().wait()

children = Children([Command("a", [sys.executable, "-c", {FOLLOWS!r}])], show, 10)
asyncio.run(main())
"""


def test_a_child_does_not_outlive_a_killed_supervisor() -> None:
    """SIGKILL leaves no time to stop anybody: the children notice by themselves."""
    supervisor = subprocess.Popen([sys.executable, "-c", SUPERVISES], stdout=subprocess.PIPE, text=True)
    assert supervisor.stdout is not None
    with supervisor.stdout:
        pid = int(supervisor.stdout.readline().split()[0])
        supervisor.send_signal(signal.SIGKILL)
        supervisor.wait()
        wait_for_end(pid)
    assert not is_alive(pid)
