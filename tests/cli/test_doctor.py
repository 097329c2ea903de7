"""`pannier doctor` finds what is wrong, and says what to do."""

from collections.abc import Iterator
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
from pannier.net.keys import make_keys
from pannier.ops import native
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
    """Nobody there, and somebody who is no gateway for clients."""
    nobody = one(check_stack(f"ipc://{stack.folder}/nobody", None, insecure=False), "gateway")
    assert (nobody.level, "client_endpoint" in nobody.advice) == ("error", True)
    other = one(check_stack(stack.control, None, insecure=False), "gateway")
    assert other.level == "error"


@pytest.mark.slow
def test_a_wrong_key(stack: Stack, tmp_path: Path) -> None:
    """Of a client whom the gateway doesn't know."""
    make_keys(tmp_path / "keys", ["stranger"])
    finding = one(check_stack(stack.endpoint, tmp_path / "keys" / "stranger", insecure=False), "gateway")
    assert (finding.level, "key" in finding.advice) == ("error", True)


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
