"""Hosts that aren't there, on one switch: Linux network namespaces, veth pairs and a bridge. Needs root and iproute2.

Each host is a namespace with one network card, `eth0`, whose cable ends in a port of the switch, a namespace of its
own. Cards and ports send no faster than the rate that was set, so that two who send to one host share its cable. Only
the network is divided: files, and sockets in the file system, are those of the real host.

Namespaces bear the process id of whoever made them. Should that be killed, the next network to be made removes them.
"""

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

PREFIX = "pannier-lab"
SWITCH, BRIDGE, CARD = "switch", "br0", "eth0"
BURST_S, LEAST_BURST = 200e-6, 4 << 10
"""What passes at once after a pause: as much as the rate brings in this time, but not less. With smaller bursts the
kernel's timers are too coarse for the rate."""
QUEUE = "50ms"
"""Longest wait at a card or port; what would wait longer is dropped."""
_numbers = count()


class NoLaboratory(Exception):
    """Raised where such a network, or a part of it, is impossible; says what is missing and how to get it."""


class Traffic(NamedTuple):
    """Bytes that a card has sent and received, with all headers."""

    sent: int
    received: int


class Network:
    """Hosts on a switch, as a context: made on entering, and nothing is left on leaving."""

    def __init__(self, hosts: Sequence[str]) -> None:
        """Names have at most 15 characters."""
        self.hosts = tuple(hosts)
        self._name = f"{PREFIX}-{os.getpid()}-{next(_numbers)}"

    def __enter__(self) -> Self:
        sweep()
        try:
            self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def address(self, host: str) -> str:
        """Of a host's card."""
        return f"10.0.0.{self.hosts.index(host) + 1}"

    def inside(self, host: str, command: Sequence[str]) -> list[str]:
        """A command line that runs another one on a host. It becomes that other: same process, same stdin."""
        return ["ip", "netns", "exec", self._namespace(host), *command]

    # --- what the network is like ---------------------------------------------------------------------------------

    def has_netem(self) -> bool:
        """Whether this kernel can delay packets."""
        try:
            self._delay(self.hosts[0], 1.0)
        except NoLaboratory:
            return False
        _run("tc", "-n", self._namespace(SWITCH), "qdisc", "delete", "dev", self.hosts[0], "root")
        return True

    def shape(self, gigabits: float, delay_us: float = 0.0) -> None:
        """Cables carry so many Gbit/s each way, and take so long each way. A delay needs netem.

        Not for cables over which connections transfer at the moment: what waits at a card or port is lost.
        """
        switch = self._namespace(SWITCH)
        for host in self.hosts:
            _limit(self._namespace(host), CARD, "root", gigabits)
            if delay_us:
                self._delay(host, delay_us)
                _limit(switch, host, "parent 1:1", gigabits)
            else:
                _limit(switch, host, "root", gigabits)

    def lose(self, share: float) -> None:
        """Every host loses so much of the packets that arrive, at random; 0: none. Needs nft or iptables.

        These are packets as the kernel hands them on, which may be of 64 KiB.
        """
        for host in self.hosts:
            _run(*self.inside(host, _forget_rules()))
            if share:
                _run(*self.inside(host, _drop_rule(share)))

    def unplug(self, host: str) -> None:
        """Pull a host's cable."""
        _run("ip", "-n", self._namespace(SWITCH), "link", "set", "dev", host, "down")

    def plug(self, host: str) -> None:
        """Put it back."""
        _run("ip", "-n", self._namespace(SWITCH), "link", "set", "dev", host, "up")

    # --- what happens on it ---------------------------------------------------------------------------------------

    def traffic(self, host: str) -> Traffic:
        """Of a host's card, since it was made."""
        (card,) = json.loads(_run("ip", "-j", "-s", "-n", self._namespace(host), "link", "show", "dev", CARD))
        return Traffic(card["stats64"]["tx"]["bytes"], card["stats64"]["rx"]["bytes"])

    def retransmitted(self, host: str) -> int:
        """TCP segments that a host has had to send again."""
        lines = _run(*self.inside(host, ["cat", "/proc/net/snmp"])).splitlines()
        names, values = (line.split() for line in lines if line.startswith("Tcp:"))
        return int(values[names.index("RetransSegs")])

    # --- how it is made -------------------------------------------------------------------------------------------

    def _namespace(self, host: str) -> str:
        return f"{self._name}-{host}"

    def _build(self) -> None:
        switch = self._namespace(SWITCH)
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", BRIDGE, "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "dev", BRIDGE, "up")
        for host in self.hosts:
            self._add(host, switch)

    def _add(self, host: str, switch: str) -> None:
        own = self._namespace(host)
        _run("ip", "netns", "add", own)
        _run(*("ip", "-n", own, "link", "add", CARD, "type", "veth"), *("peer", "name", host, "netns", switch))
        _run("ip", "-n", switch, "link", "set", "dev", host, "master", BRIDGE, "up")
        _run("ip", "-n", own, "address", "add", f"{self.address(host)}/24", "dev", CARD)
        for card in ("lo", CARD):
            _run("ip", "-n", own, "link", "set", "dev", card, "up")

    def _remove(self) -> None:
        _remove([self._namespace(host) for host in (SWITCH, *self.hosts)])

    def _delay(self, host: str, delay_us: float) -> None:
        netem = ("netem", "delay", f"{delay_us:g}us", "limit", "100000")
        _run("tc", "-n", self._namespace(SWITCH), "qdisc", "replace", "dev", host, "root", "handle", "1:", *netem)


def missing() -> str | None:
    """Why there can be no network laboratory here, and what helps; None: there can. It tries one for a moment."""
    if os.geteuid() != 0:
        return "a network laboratory needs root, which alone may make network namespaces: run this as root"
    if not all(map(shutil.which, ("ip", "tc"))):
        return "a network laboratory needs the commands ip and tc: apt-get install iproute2, or your system's like"
    try:
        with Network(["probe"]) as network:
            network.shape(1.0)
    except NoLaboratory as error:
        return (
            "a network laboratory needs a kernel with veth, bridge and tbf, and leave to make namespaces "
            f"(of a container: --privileged); {error}"
        )
    return None


def sweep() -> None:
    """Remove the namespaces of makers that are no more, and end what still runs in them."""
    made = re.findall(rf"^({PREFIX}-(\d+)-\S+)", _run("ip", "netns", "list"), re.MULTILINE)
    _remove([name for name, maker in made if not Path("/proc", maker).exists()])


def _remove(namespaces: Iterable[str]) -> None:
    """Another may be removing them too, so nothing here need succeed."""
    for name in namespaces:
        found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
        for pid in found.stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _limit(namespace: str, card: str, where: str, gigabits: float) -> None:
    rate = gigabits * 1e9
    burst = max(LEAST_BURST, round(rate / 8 * BURST_S))
    bucket = ("tbf", "rate", f"{rate:.0f}bit", "burst", f"{burst}b", "latency", QUEUE)
    _run("tc", "-n", namespace, "qdisc", "replace", "dev", card, *where.split(), *bucket)


def _forget_rules() -> list[str]:
    return ["nft", "flush", "ruleset"] if _has_nft() else ["iptables", "-F", "INPUT"]


def _drop_rule(share: float) -> list[str]:
    if not _has_nft():
        return [*("iptables", "-A", "INPUT", "-i", CARD, "-m", "statistic", "--mode", "random"),
                *("--probability", f"{share:.5f}", "-j", "DROP")]  # fmt: skip
    rule = f"iifname {CARD} numgen random mod 100000 < {share * 100000:.0f} drop"
    return ["nft", f"table inet lab {{ chain input {{ type filter hook input priority 0; {rule}; }}; }}"]


def _has_nft() -> bool:
    """Raises `NoLaboratory` if there is neither that nor iptables."""
    if shutil.which("nft") is not None:
        return True
    if shutil.which("iptables") is None:
        raise NoLaboratory("packets are lost by a rule of netfilter, which needs nft: apt-get install nftables")
    return False


def _run(*command: str) -> str:
    """What a command writes. Raises `NoLaboratory` if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"exit status {done.returncode}"
        raise NoLaboratory(f"{' '.join(command)}: {said}")
    return done.stdout
