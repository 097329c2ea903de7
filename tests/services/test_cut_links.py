"""A link that is cut between two processes that live: steps are repeated over the next one, and nothing is lost."""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from pannier.client import Client, RequestFailed
from pannier.net.shm import CannotShare, functions
from pannier.runtime.config import AttentionConfig
from tests.e2e.models import VOCAB, save_random_model
from tests.e2e.relay import ElsewhereService, Fact, Relay
from tests.e2e.stack import START_S, Stack

NUM_PROMPTS, MAX_TOKENS = 4, 150
CUT_AT = (10, 30, 50)
"""Tokens of the first stream."""
CHUNK = 32
FACTS: dict[str, Fact] = {"shm": "door", "tcp": "tcp", "zmq": "endpoint"}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(90)]
try:
    functions()
except CannotShare:  # as on a machine without a compiler
    KINDS = ["tcp", "zmq"]
else:
    KINDS = ["shm", "tcp", "zmq"]


def _prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, VOCAB, (10 + 25 * i,), generator=generator).tolist() for i in range(NUM_PROMPTS)]


def _complete(client: Client, prompt: list[int]) -> tuple[int, ...]:
    return client.complete(prompt, max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True).tokens


@contextmanager
def _stack(folder: Path, kind: str, place: str, real: Path) -> Iterator[tuple[Stack, Client]]:
    """A compute worker and two attention workers, of which the first is said to be at `place`."""
    save_random_model("llama", folder / "model")
    stack = Stack(folder, "tcp" if kind == "zmq" else "ipc")
    stack.gateway(folder / "model", attention_workers=2, max_batch_tokens=CHUNK, max_sequences=8, block_size=16)
    attention = {"threads": 1, "listen": "tcp://127.0.0.1:0", "memory": 16 << 20, "gateway": stack.control}
    elsewhere = ElsewhereService(FACTS[kind], place, real)
    stack.start(elsewhere, "attention-0", AttentionConfig(name="attention-0", **attention))
    stack.attention("attention-1", memory=16 << 20)
    stack.compute(folder / "model", dtype="float32", link=kind)
    try:
        with Client(stack.endpoint, connect_timeout_s=START_S) as client:
            yield stack, client
    finally:
        stack.stop()


@pytest.mark.parametrize("kind", KINDS)
def test_every_request_gets_its_text_though_its_link_is_cut_time_and_again(tmp_path: Path, kind: str) -> None:
    """Long before anybody loses patience; no block stays behind, and none of the processes."""
    with Relay(FACTS[kind], tmp_path / "real") as relay:
        with (
            _stack(tmp_path, kind, relay.place, relay.real) as (stack, client),
            ThreadPoolExecutor(NUM_PROMPTS) as pool,
        ):
            stack.wait_until_ready(client)
            undisturbed = [_complete(client, prompt) for prompt in _prompts()]
            assert relay.num_connections == 1
            others = [pool.submit(_complete, client, prompt) for prompt in _prompts()[1:]]
            tokens: list[int] = []
            with client.stream(_prompts()[0], max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True) as stream:
                cuts = list(CUT_AT)
                for chunk in stream:
                    tokens += chunk.tokens
                    if cuts and len(tokens) >= cuts[0]:
                        del cuts[0]
                        relay.cut()
            assert [tuple(tokens), *(each.result() for each in others)] == undisturbed
            status = client.status()
            assert {group["used"] for group in status["groups"].values()} == {0}
            assert status["accounting_errors"] == 0
            assert all(process.is_alive() for process in stack.processes.values())
        assert relay.num_connections == 1 + len(CUT_AT)


@pytest.mark.parametrize("kind", ["tcp", "zmq"])
def test_a_link_that_never_comes_up_ends_in_one_error_that_names_both_ends(tmp_path: Path, kind: str) -> None:
    """The compute worker's last words, while the attention worker, which may serve others, stays."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        nobody = f"127.0.0.1:{taken.getsockname()[1]}"
    with _stack(tmp_path, kind, nobody, tmp_path / "real") as (stack, client):
        compute = stack.processes["compute-0"]
        compute.join(START_S)
        assert compute.exitcode == 1
        said = (tmp_path / "compute-0.log").read_text().splitlines()[-1]
        assert f"compute-0 can't reach attention-0 (tcp://{nobody}: " in said
        with pytest.raises(RequestFailed, match="not ready"):
            _complete(client, _prompts()[0])
        assert stack.processes["attention-0"].is_alive()
