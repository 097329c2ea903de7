"""The network laboratory itself: rates are kept, packets are lost, nothing is left. Skipped where there can be none."""

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from scripts.lab import network as lab
from scripts.lab.network import Network, NoLaboratory, missing, sweep
from scripts.lab.raw_tcp import raw_tcp

REFUSED = errno.ECONNREFUSED
ROOT = Path(__file__).parents[2]
KILLED = """
import subprocess, sys, time
from scripts.lab.network import Network
with Network(["left"]) as network:
    sleeping = subprocess.Popen(network.inside("left", ["sleep", "1000"]))
    print(sleeping.pid, flush=True)
    time.sleep(1000)
"""


@pytest.fixture
def network() -> Iterator[Network]:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    with Network(["a", "b"]) as network:
        yield network


def test_no_cable_carries_more_than_its_rate(network: Network) -> None:
    """Plain TCP gets most of it; both cards have counted what went through."""
    network.shape(0.1)
    found = raw_tcp(network, "a", "b", 0.5)
    assert 0.05 < found.gigabits < 0.11
    assert network.traffic("a").sent > 1e6
    assert network.traffic("b").received > 1e6


@pytest.mark.slow
def test_packets_are_lost_and_sent_again(network: Network) -> None:
    """Until losses are taken back."""
    network.shape(1.0)
    try:
        network.lose(0.01)
    except NoLaboratory as error:
        pytest.skip(str(error))
    raw_tcp(network, "a", "b", 0.5)
    lost = network.retransmitted("a")
    assert lost > 0
    network.lose(0.0)
    raw_tcp(network, "a", "b", 0.1)


def test_a_cable_can_be_pulled_and_put_back(network: Network) -> None:
    """Nothing gets through in between."""
    dial = "import socket, sys; s = socket.socket(); s.settimeout(1); sys.exit(s.connect_ex((sys.argv[1], 9)))"

    def is_answered() -> bool:
        """With a refusal, as nobody listens."""
        dialling = network.inside("a", [sys.executable, "-c", dial, network.address("b")])
        return subprocess.run(dialling, check=False).returncode == REFUSED

    assert is_answered()
    network.unplug("b")
    assert not is_answered()
    network.plug("b")
    assert is_answered()


@pytest.mark.usefixtures("network")
def test_nothing_is_left_of_a_maker_that_was_killed() -> None:
    """Namespaces, and what runs in them, are gone when the next one begins; those of a live maker stay."""
    with subprocess.Popen([sys.executable, "-c", KILLED], cwd=ROOT, stdout=subprocess.PIPE, text=True) as maker:
        assert maker.stdout is not None
        inside = int(maker.stdout.readline())
        os.kill(maker.pid, signal.SIGKILL)
    sweep()
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert f"{lab.PREFIX}-{maker.pid}-" not in left
    assert f"{lab.PREFIX}-{os.getpid()}-" in left
    assert not _runs(inside)


def _runs(pid: int) -> bool:
    """A zombie doesn't."""
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "zombie" not in status.read_text()


@pytest.mark.parametrize(
    ("user", "tools", "said"), [(1000, True, "needs root"), (0, False, "apt-get install iproute2")]
)
def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, user: int, tools: bool, said: str) -> None:
    """In one sentence, with how to get it."""
    monkeypatch.setattr(os, "geteuid", lambda: user)
    if not tools:
        monkeypatch.setattr(shutil, "which", lambda _: None)
    assert said in (missing() or "")


def test_a_refusal_of_the_kernel_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in a container, where root may not make namespaces."""
    for tool in ("ip", "tc"):
        (tmp_path / tool).write_text("#!/bin/sh\necho Operation not permitted >&2; exit 1\n")
        (tmp_path / tool).chmod(0o755)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert "Operation not permitted" in (missing() or "")
