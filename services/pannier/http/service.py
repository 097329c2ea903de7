"""The HTTP front as a process."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import structlog
import uvicorn

from pannier.client import AsyncClient, ClientError
from pannier.http.app import Front
from pannier.net import PortBusy
from pannier.runtime.config import HttpConfig
from pannier.runtime.service import in_thread, run_service
from pannier.runtime.tracing import Tracer, open_tracer

BACKLOG = 1024
RETRY_S = 1.0
log = structlog.get_logger()


def run(config: HttpConfig) -> int:
    """Serve until told to stop; the process's exit code."""
    return run_service(HttpService(config))


class HttpService:
    """A server, and the client of the gateway behind it."""

    role = "http"

    def __init__(self, config: HttpConfig) -> None:
        self.name = config.name
        self._config = config
        self._client: AsyncClient | None = None
        self._socket: socket.socket | None = None
        self._server: _Server | None = None
        self._tracer: Tracer | None = None

    async def startup(self) -> None:
        """Bind, then wait for a gateway that serves. Raises `PortBusy`, `ConfigError`, and `NetError` for keys."""
        config = self._config
        self._tracer = open_tracer(self.role, config.name, config.otlp_endpoint)
        self._socket = _bind(config.host, config.port)
        self._client = AsyncClient(config.gateway, insecure=config.insecure, keys=config.used_keys)
        front = Front(self._client, config, await self._first_status(self._client), self._tracer)
        self._server = _Server(
            uvicorn.Config(
                front.app(),
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=None,
                ssl_certfile=config.tls_certificate,
                ssl_keyfile=config.tls_key,
            )
        )
        host, port = self._socket.getsockname()[:2]
        scheme = "http" if config.tls_certificate is None else "https"
        log.info("listening", url=f"{scheme}://{host}:{port}")

    async def run(self) -> None:
        """Serve until cancelled."""
        assert self._server is not None
        assert self._socket is not None
        await self._server.serve(sockets=[self._socket])

    async def drain(self) -> None:
        """Take no new connections and finish what is there; `run` ends with it."""
        assert self._server is not None
        self._server.should_exit = True
        await self._server.ended.wait()

    async def close(self) -> None:
        """Give back the port and the connection."""
        if self._tracer is not None:
            await in_thread(self._tracer.close)
        if self._client is not None:
            await self._client.close()
        if self._socket is not None:
            self._socket.close()

    async def _first_status(self, client: AsyncClient) -> dict[str, Any]:
        """The model's name and window, as soon as a compute worker has said them."""
        said = False
        while True:
            try:
                status = await client.status()
            except ClientError as error:
                if not said:
                    log.warning("waiting for the gateway", reason=str(error))
                said = True
            else:
                if status["ready"]:
                    return status
            await asyncio.sleep(RETRY_S if said else 0.1)


class _Server(uvicorn.Server):
    """Signals are the process's own business, not uvicorn's."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ended = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves them alone."""
        try:
            yield
        finally:
            self.ended.set()


def _bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises `PortBusy`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((host, port))
        made.listen(BACKLOG)
    except OSError as error:
        made.close()
        raise PortBusy(f"can't listen on {host}:{port}: {error.strerror}; choose another http port") from error
    made.setblocking(False)
    return made
