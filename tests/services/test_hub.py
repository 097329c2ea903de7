"""A model from a hub: a small one on loopback that speaks the part of the protocol that matters."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlparse

import pytest

from pannier.runtime.hub import names_repository
from tests.e2e.models import save_random_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
COMMIT = hashlib.sha1(b"the only commit").hexdigest()  # as git names them
REPOSITORY = "stable/ox"
TOKEN = "hf_secret"


class Hub(BaseHTTPRequestHandler):
    """One repository, which needs a token."""

    folder: Path
    downloads: list[str]

    def log_message(self, format: str, *args: Any) -> None:
        """Quietly."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlparse(self.path).path)
        if self.headers.get("Authorization") != f"Bearer {TOKEN}" or REPOSITORY not in path:
            self._refuse(401 if REPOSITORY in path else 404, "RepoNotFound")
        elif path.startswith("/api/models"):
            self._describe(path)
        else:
            self._file(path)

    def _describe(self, path: str) -> None:
        revision = path.partition("/revision/")[2] or path.partition("/tree/")[2]
        if revision not in ("", "main", COMMIT):
            self._refuse(404, "RevisionNotFound")
            return
        files = sorted(each.name for each in self.folder.iterdir())
        if "/tree/" in path:
            body: Any = [{"type": "file", "path": name, "oid": "0", "size": self._size(name)} for name in files]
        else:
            body = {"id": REPOSITORY, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
        self._send(json.dumps(body).encode(), {"Content-Type": "application/json"})

    def _file(self, path: str) -> None:
        name = path.rpartition("/")[2]
        file = self.folder / name
        if not file.is_file():
            self._refuse(404, "EntryNotFound")
            return
        if self.command == "GET":
            self.downloads.append(name)
        content = file.read_bytes()
        self._send(content, {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": COMMIT})

    def _size(self, name: str) -> int:
        return (self.folder / name).stat().st_size

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send(self, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(200)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)


@contextmanager
def hub(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Its address, and what was downloaded."""
    handler = type("Handler", (Hub,), {"folder": folder, "downloads": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", handler.downloads  # type: ignore[attr-defined]
        server.shutdown()
        thread.join()


def pannier(home: Path, endpoint: str, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """One command, with a hub cache of its own."""
    variables = {
        **os.environ, "HF_HOME": str(home), "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": TOKEN,
        "HF_HUB_DISABLE_TELEMETRY": "1", "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(home / "cache"),
    }  # fmt: skip
    return subprocess.run(
        [sys.executable, "-m", "pannier.cli", *arguments],
        env=variables | environment, capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip


def test_a_model_of_a_hub_is_downloaded_once_and_served(tmp_path: Path) -> None:
    """By name and by revision; afterwards without the hub; and what the hub refuses is one sentence."""
    save_random_model("llama", tmp_path / "model")
    (tmp_path / "model" / "pytorch_model.bin").write_bytes(b"never")
    home = tmp_path / "home"
    once = ("--once", "abc", "--max-tokens", "3")
    with hub(tmp_path / "model") as (endpoint, downloads):
        first = pannier(home, endpoint, "serve", REPOSITORY, *once)
        assert first.returncode == 0, first.stderr
        assert sorted(set(downloads)) == sorted(downloads), "each once"
        assert "model.safetensors" in downloads
        assert "pytorch_model.bin" not in downloads
        for specification, words in (
            (f"{REPOSITORY}@other", "no revision 'other'"),
            ("stable/ass", "no such repository"),
        ):
            refused = pannier(home, endpoint, "serve", specification, *once)
            assert refused.returncode == 1
            assert words in refused.stderr.splitlines()[-1]
            assert "Traceback" not in refused.stderr
        stranger = pannier(tmp_path / "elsewhere", endpoint, "serve", REPOSITORY, *once, HF_TOKEN="wrong")
        assert "HF_TOKEN" in stranger.stderr.splitlines()[-1]
    offline = pannier(home, endpoint, "serve", f"{REPOSITORY}@{COMMIT}", *once, HF_HUB_OFFLINE="1")
    assert offline.returncode == 0, offline.stderr
    never = pannier(tmp_path / "elsewhere", endpoint, "serve", REPOSITORY, *once, HF_HUB_OFFLINE="1")
    assert "was not downloaded before" in never.stderr.splitlines()[-1]


@pytest.mark.parametrize("name", ["meta/llama-3", "a/b@main", "a/b@refs/pr/1", "A1/b_c.d"])
def test_what_may_be_a_repository(name: str) -> None:
    assert names_repository(name)


@pytest.mark.parametrize("name", ["/a/b", "./a/b", "~/a", "a", "a/b/c", "random:x", "../a/b", "a b/c"])
def test_what_is_a_folder(name: str) -> None:
    assert not names_repository(name)
