"""A stack in the laboratory: `pannier gateway`, `compute` and `attention`, each on its host, or all on one."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scripts.lab.network import Network

from pannier.cli.supervisor import LAST_WORDS
from pannier.client import Client, ClientError
from pannier.runtime.config import AttentionConfig, ComputeConfig, GatewayConfig, RoleConfig, load, to_toml

PORT = 5150
START_S = 120.0
STOP_S = 15.0
Settings = Mapping[str, object]


class StackEnded(Exception):
    """Raised when a process of a stack has ended by itself, or never came so far; the text says which and why."""


class Stack:
    """Processes by name, each on the host of that name, unless all are to be `together` on one.

    Clients come in by a socket in the file system, which all hosts of a laboratory share.
    """

    def __init__(
        self, network: Network, folder: Path, *, together: str | None = None, port: int = PORT, **every_role: Any
    ) -> None:
        """The folder must be there. Of several stacks on one host each needs another `port` for its gateway."""
        self.folder = folder
        self.endpoint = f"ipc://{folder}/clients"
        self.keys: Path | None = every_role.get("keys")
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._network = network
        self._together = together
        self._port = port
        self._every_role = every_role
        self._commands: dict[str, list[str]] = {}

    def gateway(self, settings: Settings) -> None:
        """Start the gateway."""
        address = self._address("gateway")
        own = {
            "control_endpoint": f"tcp://{address}:{self._port}",
            "data_endpoint": f"tcp://{address}:0",
            "client_endpoint": self.endpoint,
        }
        self._add("gateway", GatewayConfig, {**own, **settings})

    def compute(self, settings: Settings) -> None:
        """Start the compute worker."""
        self._add("compute", ComputeConfig, {"name": "compute", "threads": 1, **self._gateway(), **settings})

    def attention(self, number: int, settings: Settings) -> None:
        """Start an attention worker."""
        name = f"attention-{number}"
        own = {"name": name, "threads": 1, "listen": f"tcp://{self._address(name)}:0", **self._gateway()}
        self._add(name, AttentionConfig, {**own, **settings})

    def start(self, name: str) -> None:
        """Start a process, or once more one that has ended."""
        if name in self.processes:
            self._leave(self.processes[name])
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        with self._log(name).open("ab") as log:
            self.processes[name] = subprocess.Popen(
                self._commands[name], stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment,
                start_new_session=True,
            )  # fmt: skip

    def client(self) -> Client:
        """A client of this stack."""
        return Client(self.endpoint, keys=self.keys)

    def wait_until_ready(self, client: Client) -> None:
        """Until requests are served. Raises `StackEnded`."""
        deadline = time.monotonic() + START_S
        while not self._is_ready(client):
            self.check()
            if time.monotonic() > deadline:
                raise StackEnded(f"the stack in {self.folder} is not ready after {START_S:g} s")
            time.sleep(0.1)

    def _is_ready(self, client: Client) -> bool:
        try:
            return bool(client.status()["ready"])
        except ClientError:  # it is not there yet
            return False

    def check(self) -> None:
        """Raises `StackEnded`."""
        for name, process in self.processes.items():
            if process.poll() is not None:
                raise StackEnded(f"{name} has ended: {self.last_words(name)}")

    def last_words(self, name: str) -> str:
        """Why a process ended, in its words, or else the last line that it wrote."""
        lines = self._log(name).read_text(errors="replace").splitlines() or ["it wrote nothing"]
        words = [line for line in lines if line.startswith(LAST_WORDS)] or lines  # a library may have the last line
        return words[-1].removeprefix(LAST_WORDS)

    def stop(self) -> dict[str, int]:
        """Ask every process to leave, the gateway last; their exit codes."""
        for process in reversed(self.processes.values()):
            process.terminate()
        return {name: self._leave(process) for name, process in self.processes.items()}

    def _leave(self, process: subprocess.Popen[bytes]) -> int:
        """Wait for its end, not for ever; its exit code."""
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
        assert process.stdin is not None
        process.stdin.close()
        return process.wait()

    def _host(self, name: str) -> str:
        return self._together or name

    def _address(self, name: str) -> str:
        return "127.0.0.1" if self._together else self._network.address(name)

    def _gateway(self) -> dict[str, object]:
        return {"gateway": f"tcp://{self._address('gateway')}:{self._port}"}

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def _add(self, name: str, kind: type[RoleConfig], settings: Settings) -> None:
        config, file = load(kind, flags={**self._every_role, **settings}, environ={}), self.folder / f"{name}.toml"
        file.write_text(to_toml(config))
        # Supervised: it ends with this process, whose pipe it has as stdin.
        role = [sys.executable, "-m", "pannier.cli", kind.role, "--config", str(file), "--supervised"]
        self._commands[name] = self._network.inside(self._host(name), role)
        self.start(name)


@contextmanager
def running(
    stack: Stack, gateway: Settings, compute: Settings, attention: Settings, attention_workers: int = 2
) -> Iterator[Client]:
    """A client of a stack that is ready; without attention workers the compute worker must be monolithic."""
    try:
        stack.gateway({"attention_workers": max(1, attention_workers), **gateway})
        stack.compute(compute)
        for number in range(attention_workers):
            stack.attention(number, attention)
        with stack.client() as client:
            stack.wait_until_ready(client)
            yield client
    finally:
        stack.stop()
