"""A stack over TCP: the same text with keys and several flows, and who has no known key is turned away."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from pannier.client import Client, Unreachable
from pannier.net.keys import make_keys
from tests.e2e.check import check_same
from tests.e2e.models import VOCAB, logprobs_after, save_random_model
from tests.e2e.stack import START_S, Stack, running_stack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
PROMPT_TOKENS = 40


@pytest.fixture(scope="module")
def uncut(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("model")
    return folder, save_random_model("llama", folder)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    make_keys(folder)
    return folder


@pytest.fixture(scope="module")
def strange(tmp_path_factory: pytest.TempPathFactory, keys: Path) -> Path:
    """Keys that name the right gateway, which doesn't know them."""
    folder = tmp_path_factory.mktemp("strange")
    make_keys(folder)
    (folder / "gateway.public").write_bytes((keys / "gateway.public").read_bytes())
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(params=[("all", "zmq"), ("control", "zmq"), ("control", "tcp")], ids=" ".join)
def encrypted(
    request: pytest.FixtureRequest, uncut: tuple[Path, PreTrainedModel], keys: Path, cache: Path, tmp_path: Path
) -> Iterator[tuple[str, str, Stack, Client]]:
    """A ready stack over TCP, where links have three flows."""
    encrypt, link = request.param
    with running_stack(
        tmp_path / "run",
        uncut[0],
        compute={"dtype": "float32", "cache_dir": cache, "link": link, "flows": 3},
        transport="tcp",
        every_role={"keys": keys, "encrypt": encrypt},
        client_keys=keys,
        max_batch_tokens=16,
        max_sequences=8,
        block_size=16,
    ) as (stack, client):
        yield encrypt, link, stack, client


def _role(status: dict[str, Any], role: str) -> dict[str, Any]:
    return next(process for process in status["processes"] if process["role"] == role)


def test_same_text_and_no_strangers(
    encrypted: tuple[str, str, Stack, Client], uncut: tuple[Path, PreTrainedModel], strange: Path
) -> None:
    """Exact tokens; the status says what is encrypted and how many flows; strangers get one error each, and count."""
    how, link, stack, client = encrypted
    prompt = torch.randint(3, VOCAB, (PROMPT_TOKENS,), generator=torch.Generator().manual_seed(2)).tolist()
    completion = client.complete(prompt, max_tokens=16, temperature=0.0, logprobs=20, ignore_eos=True)
    assert check_same(completion.logprobs, logprobs_after(uncut[1], prompt, list(completion.tokens))) == 0
    status = client.status()
    assert _role(status, "gateway")["encrypt"] == how
    assert _role(status, "compute")["link"] == {"zmq": "zmq tcp x3", "tcp": "tcp x3"}[link]
    for process in status["processes"]:
        if process["role"] == "attention":
            assert process["counters"].get("stale_frames", 0) == 0
    for wrong, why in ((strange, "it doesn't know this key"), (None, "keys")):
        with Client(stack.endpoint, keys=wrong, connect_timeout_s=10.0) as other, pytest.raises(Unreachable, match=why):
            other.status()
    deadline = time.monotonic() + START_S
    while _role(client.status(), "gateway")["refused_handshakes"] < 2:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _last_words(stack: Stack, name: str) -> str:
    process = stack.processes[name]
    process.join(START_S)
    assert process.exitcode == 1, process.exitcode
    return (stack.folder / f"{name}.log").read_text().splitlines()[-1]


def test_a_worker_with_an_unknown_key_cannot_register(
    uncut: tuple[Path, PreTrainedModel], keys: Path, strange: Path, tmp_path: Path
) -> None:
    """Nor one with a client's key, nor one without any; each ends and says why."""
    (tmp_path / "client").mkdir()
    for name in ("gateway.public", "worker.public"):
        (tmp_path / "client" / name).write_bytes((keys / name).read_bytes())
    as_worker = tmp_path / "client" / "worker.secret"
    as_worker.write_bytes((keys / "client.secret").read_bytes())
    as_worker.chmod(0o600)
    stack = Stack(tmp_path, "tcp")
    stack.gateway(uncut[0], keys=keys)
    try:
        for number, folder in enumerate((strange, tmp_path / "client")):
            stack.attention(f"attention-{number}", keys=folder)
            assert f"{stack.control} can't be reached: it doesn't know this key" in _last_words(
                stack, f"attention-{number}"
            )
        with Client(stack.endpoint, keys=keys, connect_timeout_s=START_S) as client:
            assert [process["role"] for process in client.status()["processes"]] == ["gateway"]
    finally:
        codes = stack.stop()
    assert codes["gateway"] == 0


def test_workers_that_do_not_agree_on_links_are_told(
    uncut: tuple[Path, PreTrainedModel], keys: Path, tmp_path: Path
) -> None:
    """Else the two ends of a link would never meet."""
    stack = Stack(tmp_path, "tcp", keys=keys)
    stack.gateway(uncut[0])
    stack.attention("attention-0", encrypt="all")
    try:
        with Client(stack.endpoint, keys=keys, connect_timeout_s=START_S) as client:
            deadline = time.monotonic() + START_S
            while len(client.status()["processes"]) < 2:
                assert time.monotonic() < deadline
                time.sleep(0.05)
        stack.attention("attention-1", encrypt="control")
        words = _last_words(stack, "attention-1")
    finally:
        stack.stop()
    assert "attention-0 encrypts its links and attention-1 does not: give both the same keys and encrypt" in words


def test_keys_that_cannot_be_read_end_a_process(
    uncut: tuple[Path, PreTrainedModel], keys: Path, tmp_path: Path
) -> None:
    """With the file, before anything listens."""
    (tmp_path / "open").mkdir()
    for name in ("gateway.secret", "worker.public"):
        (tmp_path / "open" / name).write_bytes((keys / name).read_bytes())
    (tmp_path / "open" / "clients").symlink_to(keys / "clients")
    (tmp_path / "open" / "gateway.secret").chmod(0o644)
    stack = Stack(tmp_path)
    stack.gateway(uncut[0], keys=tmp_path / "open")
    try:
        assert "gateway.secret is open to others (mode 0644)" in _last_words(stack, "gateway")
    finally:
        stack.stop()
