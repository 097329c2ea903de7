"""A stack of real processes with an HTTP front, which the tests of this folder share."""

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from pannier.client import Client
from pannier.http import service as http_service
from pannier.runtime.config import HttpConfig
from tests.e2e.stack import Stack, running_stack

EMBEDDED = Path(__file__).parents[2] / "common/pannier/models/embedded"
KEY = "sesame"
START_S = 60.0


@dataclass(frozen=True)
class Front:
    """One HTTP front and what is behind it."""

    url: str
    stack: Stack
    client: Client

    def post(self, path: str, **body: Any) -> httpx.Response:
        """A request in plain HTTP."""
        return httpx.post(f"{self.url}{path}", json=body, timeout=60, headers={"Authorization": f"Bearer {KEY}"})

    def get(self, path: str, **options: Any) -> httpx.Response:
        """The same."""
        return httpx.get(f"{self.url}{path}", timeout=60, headers={"Authorization": f"Bearer {KEY}"}, **options)

    def wait_until_blocks_return(self, seconds: float) -> None:
        """Every block is free, or keeps a prefix."""
        deadline = time.monotonic() + seconds
        while any(group["used"] for group in self.client.status()["groups"].values()):
            assert time.monotonic() < deadline, "blocks are still in use"
            time.sleep(0.02)


@pytest.fixture(scope="session")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    """Of the embedded model, in fp32."""
    folder = tmp_path_factory.mktemp("http")
    with running_stack(folder / "run", EMBEDDED, compute={"dtype": "float32"}, max_waiting=64) as (stack, client):
        config = HttpConfig(
            gateway=stack.endpoint, port=0, api_keys=("other", KEY), cors_origins=("https://a.example",)
        )
        stack.start(http_service.run, "http", config)
        yield Front(url_in(folder / "run" / "http.log"), stack, client)


@pytest.fixture(scope="session")
def open_front(front: Front) -> Front:
    """Another one of the same stack, which lets everybody in."""
    front.stack.start(http_service.run, "http-open", HttpConfig(name="open", gateway=front.stack.endpoint, port=0))
    return Front(url_in(front.stack.folder / "http-open.log"), front.stack, front.client)


def url_in(log: Path) -> str:
    """Where a front says that it listens."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        text = re.sub(r"\x1b\[[0-9;]*m", "", log.read_text()) if log.exists() else ""
        if found := re.search(r"url=(http://\S+)", text):
            return found[1]
        time.sleep(0.05)
    raise TimeoutError("the front does not listen")
