"""Links of all kinds carry the same: exact tokens, and nothing from a session that was fenced."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from pannier.client import Client
from pannier.net.shm import CannotShare, functions
from tests.e2e.models import VOCAB, save_random_model
from tests.e2e.stack import running_stack

NUM_PROMPTS, MAX_TOKENS = 6, 40
CHUNK = 64
"""Prompts are longer: they come in chunks, with one-way pieces and requests in one step."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
try:
    functions()
except CannotShare as missing:  # as on a machine without a compiler
    pytestmark.append(pytest.mark.skip(reason=str(missing)))


def _prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, VOCAB, (10 + 25 * i,), generator=generator).tolist() for i in range(NUM_PROMPTS)]


def _complete(client: Client) -> list[tuple[int, ...]]:
    def complete(prompt: list[int]) -> tuple[int, ...]:
        return client.complete(prompt, max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True).tokens

    with ThreadPoolExecutor(NUM_PROMPTS) as pool:
        return list(pool.map(complete, _prompts()))


def test_the_same_tokens_through_shared_memory_plain_tcp_and_zeromq(tmp_path: Path) -> None:
    """And the status says what each stack has."""
    save_random_model("llama", tmp_path / "model")
    tokens, kinds = {}, {}
    for link in ("auto", "shm", "tcp", "zmq"):
        with running_stack(
            tmp_path / link,
            tmp_path / "model",
            compute={"dtype": "float32", "cache_dir": tmp_path / "cache", "link": link},
            max_batch_tokens=CHUNK,
            max_sequences=8,
            block_size=16,
        ) as (_, client):
            tokens[link] = _complete(client)
            (kinds[link],) = [p["link"] for p in client.status()["processes"] if p["role"] == "compute"]
    assert kinds == {"auto": "shm", "shm": "shm", "tcp": "tcp", "zmq": "zmq ipc"}
    assert tokens["shm"] == tokens["tcp"] == tokens["zmq"] == tokens["auto"]
    assert len(set(tokens["shm"])) == NUM_PROMPTS


@pytest.mark.parametrize("link", ["shm", "tcp"])
def test_an_attention_worker_that_is_killed_leaves_nothing_and_is_replaced(tmp_path: Path, link: str) -> None:
    """Its group is computed again by its successor, through new shared memory or a new connection."""
    save_random_model("llama", tmp_path / "model")
    with running_stack(
        tmp_path / "run",
        tmp_path / "model",
        attention_workers=1,
        compute={"dtype": "float32", "cache_dir": tmp_path / "cache", "link": link},
        max_batch_tokens=CHUNK,
        max_sequences=8,
        block_size=16,
        heartbeat_s=0.3,
    ) as (stack, client):
        undisturbed = _complete(client)
        compute = stack.processes["compute-0"].pid
        assert compute is not None
        before = _mappings(compute), _sockets(compute)
        assert before[0] == (link == "shm")
        killed = stack.processes.pop("attention-0")
        assert killed.pid is not None
        os.kill(killed.pid, signal.SIGKILL)
        killed.join()
        stack.attention("attention-1")
        stack.wait_until_ready(client)
        assert _complete(client) == undisturbed
        assert (_mappings(compute), _sockets(compute)) == before, "nothing of the former link is left"
        (stack.folder / "attention-0").unlink()  # of its sockets, which a killed process leaves


def _mappings(pid: int) -> int:
    return Path(f"/proc/{pid}/maps").read_text().count("pannier-link")


def _sockets(pid: int) -> int:
    return sum(os.readlink(file).startswith("socket:") for file in Path(f"/proc/{pid}/fd").iterdir())
