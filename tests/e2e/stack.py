"""A whole stack of real processes for tests: gateway, compute and attention workers over ipc, or over TCP.

The processes are forked from one server that has imported torch already, so that a stack starts in a second.
"""

import multiprocessing
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from pannier.attention import service as attention_service
from pannier.client import Client
from pannier.compute import service as compute_service
from pannier.gateway import service as gateway_service
from pannier.runtime.config import AttentionConfig, ComputeConfig, GatewayConfig

START_S = 90.0
STOP_S = 15.0
ANY_PORT = "tcp://127.0.0.1:0"

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload([attention_service.__name__, compute_service.__name__, gateway_service.__name__])


def _run(role: Callable[[Any], int], config: Any, log: Path) -> None:
    with log.open("w") as stream:
        sys.stderr = sys.stdout = stream
        sys.exit(role(config))


class Stack:
    """The processes of a stack, by name, and where clients find it."""

    def __init__(self, folder: Path, transport: str = "ipc", **every_role: Any) -> None:
        """Settings in `every_role` are given to all processes."""
        self.folder = folder
        self._is_tcp = transport == "tcp"
        self._every_role = every_role
        self.endpoint = f"ipc://{folder}/clients"
        self.control = f"ipc://{folder}/control"
        self.processes: dict[str, BaseProcess] = {}

    def start(self, role: Callable[[Any], int], name: str, config: Any) -> BaseProcess:
        """Start one process; its output goes to NAME.log in the folder."""
        process = _context.Process(target=_run, args=(role, config, self.folder / f"{name}.log"), name=name)
        process.start()
        self.processes[name] = process
        return process

    def gateway(self, model: Path, name: str = "gateway", **settings: Any) -> BaseProcess:
        """Start a gateway. Over TCP it takes any ports, which are known from here on."""
        config = GatewayConfig(
            model=str(model),
            control_endpoint=ANY_PORT if self._is_tcp else self.control,
            data_endpoint=ANY_PORT if self._is_tcp else f"ipc://{self.folder}/data",
            client_endpoint=ANY_PORT if self._is_tcp else self.endpoint,
            **self._every_role,
            **settings,
        )
        process = self.start(gateway_service.run, name, config)
        if self._is_tcp:
            self.endpoint, self.control = self._logged_endpoint(name, "clients"), self._logged_endpoint(name, "control")
        return process

    def _logged_endpoint(self, name: str, which: str) -> str:
        """Where a process says that it listens."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            with suppress(FileNotFoundError):
                plain = re.sub(r"\x1b\[[0-9;]*m", "", (self.folder / f"{name}.log").read_text())
                if found := re.search(rf"\b{which}=(tcp://\S+)", plain):
                    return found[1]
            time.sleep(0.02)
        raise TimeoutError(f"{name} does not listen")

    def compute(self, model: Path, name: str = "compute-0", **settings: Any) -> BaseProcess:
        """Start a compute worker."""
        config = ComputeConfig(
            model=str(model),
            name=name,
            gateway=self.control,
            listen=ANY_PORT if self._is_tcp else f"ipc://{self.folder}/{name}",
            threads=1,
            **self._every_role,
            **settings,
        )
        return self.start(compute_service.run, name, config)

    def attention(self, name: str, **settings: Any) -> BaseProcess:
        """Start an attention worker."""
        config = AttentionConfig(
            name=name,
            gateway=self.control,
            listen=ANY_PORT if self._is_tcp else f"ipc://{self.folder}/{name}",
            memory=settings.pop("memory", 64 << 20),
            threads=1,
            **self._every_role,
            **settings,
        )
        return self.start(attention_service.run, name, config)

    def wait_until_ready(self, client: Client) -> dict[str, Any]:
        """The status, once requests are served. Raises with the log of a process that ended instead."""
        deadline = time.monotonic() + START_S
        while not (status := client.status())["ready"]:
            for name, process in self.processes.items():
                if not process.is_alive():
                    raise RuntimeError(f"{name} ended: {(self.folder / f'{name}.log').read_text()[-2000:]}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"not ready: {status}")
            time.sleep(0.05)
        return status

    def stop(self) -> dict[str, int | None]:
        """Ask every process to stop, the gateway last; their exit codes."""
        for process in reversed(self.processes.values()):
            process.terminate()
        for process in self.processes.values():
            process.join(STOP_S)
        for process in self.processes.values():
            if process.is_alive():
                process.kill()
                process.join()
        return {name: process.exitcode for name, process in self.processes.items()}


@contextmanager
def running_stack(
    folder: Path,
    model: Path,
    *,
    attention_workers: int = 2,
    stages: int = 1,
    compute: dict[str, Any] | None = None,
    attention: dict[str, Any] | None = None,
    transport: str = "ipc",
    every_role: dict[str, Any] | None = None,
    client_keys: Path | None = None,
    **gateway: Any,
) -> Iterator[tuple[Stack, Client]]:
    """A ready stack and a client of it; afterwards every process must have left well, and no socket file be there."""
    folder.mkdir(parents=True, exist_ok=True)
    stack = Stack(folder, transport, **(every_role or {}))
    stack.gateway(model, attention_workers=attention_workers, compute_workers=stages, **gateway)
    for stage in range(stages):
        stack.compute(model, f"compute-{stage}", stage=stage, stages=stages, **(compute or {}))
    for number in range(attention_workers):
        stack.attention(f"attention-{number}", **(attention or {}))
    try:
        with Client(stack.endpoint, connect_timeout_s=START_S, keys=client_keys) as client:
            stack.wait_until_ready(client)
            yield stack, client
    finally:
        codes = stack.stop()
    assert set(codes.values()) == {0}, codes
    left = [path.name for path in folder.iterdir() if path.is_socket()]
    assert not left, f"socket files left: {left}"
