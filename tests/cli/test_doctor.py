"""`pannier doctor` finds what is wrong, and says what to do."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from pannier.cli import findings
from pannier.cli.findings import (
    Finding,
    check_cache,
    check_compiler,
    check_devices,
    check_shared_memory,
    check_stack,
    worst,
)
from pannier.client import Client
from pannier.net.keys import make_keys
from pannier.ops import native
from tests.cli.terminal import Terminal
from tests.e2e.models import save_random_model
from tests.e2e.stack import Stack, running_stack

pytestmark = pytest.mark.timeout(120)


def one(found: Iterator[Finding], what: str) -> Finding:
    (finding,) = [each for each in found if each.what == what]
    return finding


def test_nothing_is_wrong_here() -> None:
    """Or there would be no point in running the other tests."""
    found = [*check_compiler(), *check_devices(), *check_shared_memory()]
    assert worst(found) == 0
    assert {each.what for each in found} >= {"compiled operators", "cpu", "shared memory"}


def test_a_missing_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "cpu_isa", lambda: native.CpuIsa(None, "not built"))
    finding = one(check_compiler(find=lambda _: None), "compiled operators")
    assert (finding.level, "install g++" in finding.advice) == ("error", True)
    finding = one(check_compiler(find=lambda _: "/usr/bin/g++"), "compiled operators")
    assert (finding.level, "build_kernels" in finding.advice) == ("error", True)


def test_a_device_that_would_emulate_bfloat16() -> None:
    """As a Turing GPU, which torch says supports it."""
    finding = one(check_devices(has_native_bf16=lambda _: False), "cpu")
    assert finding.level == "warning"
    assert "bfloat16 would be emulated" in finding.said
    assert "float16" in finding.advice


def test_a_full_disk_and_a_folder_that_is_not_ours(tmp_path: Path) -> None:
    """The folder itself need not be there yet."""
    folder = tmp_path / "not" / "yet"
    assert one(check_cache(folder), "cache").level == "ok"
    full = one(check_cache(folder, free=lambda _: 1 << 20), "cache")
    assert (full.level, "1 MiB" in full.said, "make room" in full.advice) == ("error", True, True)
    (tmp_path / "file").touch()
    beneath = one(check_cache(tmp_path / "file" / "cache"), "cache")
    assert (beneath.level, "can't be written to" in beneath.said) == ("error", True)
    assert findings.cache_folder().name


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("doctor")
    save_random_model("llama", folder / "model")
    compute = {"dtype": "float32", "cache_dir": folder / "cache"}
    with running_stack(folder / "run", folder / "model", attention_workers=1, compute=compute) as (made, _):
        yield made


@pytest.mark.slow
def test_a_stack_in_order(stack: Stack) -> None:
    """A token comes through all of it."""
    found = list(check_stack(stack.endpoint, None, insecure=False))
    assert worst(found) == 0
    assert {each.what for each in found} >= {"gateway", "clock", "compute-0", "attention-0", "one token"}
    assert "shm" in one(iter(found), "one token").said


@pytest.mark.slow
def test_a_wrong_port(stack: Stack) -> None:
    """Nobody there, the gateway's door for workers, and an HTTP server."""
    nobody = one(check_stack(f"ipc://{stack.folder}/nobody", None, insecure=False), "gateway")
    assert (nobody.level, "client_endpoint" in nobody.advice) == ("error", True)
    other = one(check_stack(stack.control, None, insecure=False), "gateway")
    assert (other.level, "client_endpoint" in other.advice) == ("error", True)
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        front = one(check_stack(f"tcp://127.0.0.1:{http.server_address[1]}", None, insecure=False), "gateway")
        http.shutdown()
    assert (front.level, "HTTP" in front.advice) == ("error", True)


@pytest.mark.slow
def test_keys_where_the_gateway_has_none(stack: Stack, tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", ["alice"])
    finding = one(check_stack(stack.endpoint, tmp_path / "keys" / "alice", insecure=False), "gateway")
    assert (finding.level, "key" in finding.advice) == ("error", True)


@pytest.mark.slow
def test_a_wrong_key(stack: Stack, tmp_path: Path) -> None:
    """No key at all, another gateway's, and one that this gateway doesn't know; with the right one it answers."""
    keys, others = tmp_path / "keys", tmp_path / "others"
    make_keys(keys, ["alice"])
    make_keys(others, ["mallory", "eve"])
    (others / "mallory" / "gateway.public").write_bytes((keys / "gateway.public").read_bytes())
    guarded = Stack(tmp_path, keys=keys)
    guarded.gateway(stack.folder.parent / "model")
    try:
        with Client(guarded.endpoint, connect_timeout_s=60, keys=keys / "alice") as client:
            client.status()
        for given, words in ((None, "--keys"), (others / "mallory", "public key"), (others / "eve", "public key")):
            finding = one(check_stack(guarded.endpoint, given, insecure=False), "gateway")
            assert (finding.level, words in finding.advice) == ("error", True), (given, finding)
        answers = next(check_stack(guarded.endpoint, keys / "alice", insecure=False))
        assert (answers.what, answers.level) == ("gateway", "ok")
    finally:
        guarded.stop()


@pytest.mark.slow
def test_a_clock_that_is_wrong(stack: Stack) -> None:
    import time

    finding = one(check_stack(stack.endpoint, None, insecure=False, clock=lambda: time.time() - 60), "clock")
    assert (finding.level, "+60" in finding.said, "chrony" in finding.advice) == ("warning", True, True)


@pytest.mark.slow
def test_a_worker_with_another_model(stack: Stack, tmp_path: Path) -> None:
    """It was turned away, and the gateway remembers why."""
    save_random_model("gpt2", tmp_path / "other")
    stranger = stack.compute(tmp_path / "other", "compute-9", dtype="float32", cache_dir=tmp_path / "cache")
    stranger.join(60)
    assert stack.processes.pop("compute-9").exitcode == 1
    finding = one(check_stack(stack.endpoint, None, insecure=False), "compute-9")
    assert finding.level == "error"
    assert "give both the same model" in finding.said


@pytest.mark.slow
def test_the_command_ends_with_what_it_found(terminal: Terminal) -> None:
    """Nobody listens: status 1, the same said as JSON and as text, with what to do."""
    as_json = terminal.call("doctor", "--json")
    (found,) = [each for each in json.loads(as_json.stdout)["findings"] if each["what"] == "gateway"]
    assert (as_json.returncode, found["level"]) == (1, "error")
    as_text = terminal.call("doctor")
    assert (as_text.returncode, "is a stack running there?" in as_text.stdout) == (1, True)
    assert terminal.call("doctor", "--here").returncode == 0
