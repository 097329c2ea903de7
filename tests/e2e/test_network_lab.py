"""A stack whose processes are on hosts of their own: exact tokens, also where packets are lost; cables that are pulled.

The hosts are network namespaces (scripts/lab). Without root and iproute2 all of this is skipped.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from scripts.lab.network import Network, NoLaboratory, missing
from scripts.lab.stack import Stack, running
from transformers import PreTrainedModel

from pannier.client import Client, RequestFailed, Stream
from pannier.net.keys import make_keys
from pannier.wire.messages import Delta
from tests.e2e.check import check_same
from tests.e2e.models import VOCAB, logprobs_after, save_random_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
HOSTS = ("gateway", "compute", "attention-0", "attention-1")
PROMPT, SHORT, MIDDLING, LONG = 40, 16, 50, 100
"""Tokens. Attention is made so slow here that a long completion takes seconds."""
REQUESTS = 3
HEARTBEAT_S = 0.3
PATIENCE_S = 40.0


@dataclass(frozen=True)
class Lab:
    """A stack that is ready, its network, and the model that it serves, uncut."""

    network: Network
    stack: Stack
    client: Client
    uncut: PreTrainedModel

    def start(self, length: int) -> list[tuple[list[int], Stream, list[Delta]]]:
        """Requests under way: prompt, stream, and what has come so far, which is something."""
        generator = torch.Generator().manual_seed(2)
        prompts: list[list[int]] = torch.randint(3, VOCAB, (REQUESTS, PROMPT), generator=generator).tolist()
        streams = [
            self.client.stream(prompt, max_tokens=length, temperature=0.0, logprobs=5, ignore_eos=True)
            for prompt in prompts
        ]
        return [(prompt, stream, [next(stream)]) for prompt, stream in zip(prompts, streams, strict=True)]

    def check(self, started: list[tuple[list[int], Stream, list[Delta]]], length: int) -> None:
        """They must end with exactly what the uncut model says."""
        with ThreadPoolExecutor(len(started)) as pool:
            ends = list(pool.map(lambda each: list(each[1]), started))
        for (prompt, _, first), rest in zip(started, ends, strict=True):
            logprobs = [each for chunk in first + rest for each in chunk.logprobs]
            tokens = [each.token for each in logprobs]
            assert len(tokens) == length
            assert check_same(logprobs, logprobs_after(self.uncut, prompt, tokens)) == 0

    def process(self, name: str) -> dict[str, Any]:
        """What the status says of it."""
        return next((each for each in self.client.status()["processes"] if each["name"] == name), {"standing": "gone"})

    def check_nothing_left(self) -> None:
        """No request, no block that anybody uses, and books that balance."""
        _wait(lambda: not any(self.client.status()["requests"].values()))
        status = self.client.status()
        assert {group["used"] for group in status["groups"].values()} == {0}
        assert status["accounting_errors"] == 0


def _wait(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@contextmanager
def _lab(
    folder: Path, model: tuple[Path, PreTrainedModel], encrypt: str = "control", heartbeat_s: float = 1.0
) -> Iterator[Lab]:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    make_keys(folder / "keys")
    gateway = {"max_batch_tokens": 16, "max_sequences": 8, "block_size": 16, "heartbeat_s": heartbeat_s}
    compute = {"dtype": "float32", "cache_dir": model[0] / "cache"}
    with Network(HOSTS) as network:
        network.shape(1.0)
        stack = Stack(network, folder, keys=folder / "keys", encrypt=encrypt)
        name = {"model": str(model[0])}
        attention = {"memory": "16MiB", "emulate_attention": "20"}
        with running(stack, {**name, **gateway}, {**name, **compute}, attention) as client:
            yield Lab(network, stack, client, model[1])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("model")
    return folder, save_random_model("llama", folder)


@pytest.fixture(scope="module", params=["control", "all"])
def lab(
    request: pytest.FixtureRequest, model: tuple[Path, PreTrainedModel], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Lab]:
    with _lab(tmp_path_factory.mktemp("run"), model, request.param) as lab:
        yield lab


def test_exact_tokens_between_hosts(lab: Lab) -> None:
    """Over sockets, for hosts share no memory; and the tensors did go over the cable."""
    before = lab.network.traffic("compute")
    lab.check(lab.start(SHORT), SHORT)
    sent, received = (now - then for now, then in zip(lab.network.traffic("compute"), before, strict=True))
    assert min(sent, received) > REQUESTS * SHORT * 3 * 6 * 16 * 4  # layers, heads, head size, fp32
    assert "tcp" in lab.process("compute")["link"]


def test_exact_tokens_where_one_packet_in_a_hundred_is_lost(lab: Lab) -> None:
    """TCP sends them again, and it is seen to."""
    try:
        lab.network.lose(0.01)
    except NoLaboratory as error:
        pytest.skip(str(error))
    before = sum(map(lab.network.retransmitted, HOSTS))
    lab.check(lab.start(MIDDLING), MIDDLING)
    lab.network.lose(0.0)
    assert sum(map(lab.network.retransmitted, HOSTS)) > before
    lab.check_nothing_left()


def test_a_cable_that_is_back_within_the_heartbeats_patience_costs_time_only(lab: Lab) -> None:
    """Every request gets exactly its text, and no session ends."""
    session = lab.process("compute")["session"]
    started = lab.start(LONG)
    lab.network.unplug("attention-1")
    time.sleep(1.5)
    lab.network.plug("attention-1")
    lab.check(started, LONG)
    assert lab.process("compute")["session"] == session
    lab.check_nothing_left()


def test_an_attention_worker_that_is_cut_off_ends_its_requests_with_one_error(
    model: tuple[Path, PreTrainedModel], tmp_path: Path
) -> None:
    """It notices by itself and ends; started again behind a cable that is back, it serves again."""
    with _lab(tmp_path, model, heartbeat_s=HEARTBEAT_S) as lab:
        started = lab.start(LONG)
        lab.network.unplug("attention-1")
        for _, stream, _ in started:
            with pytest.raises(RequestFailed, match="group 0 of attention workers was lost"):
                list(stream)
        assert lab.stack.processes["attention-1"].wait(PATIENCE_S) == 1
        assert "has been silent for 10 heartbeats" in lab.stack.last_words("attention-1")
        lab.network.plug("attention-1")
        lab.stack.start("attention-1")
        _wait(lambda: bool(lab.client.status()["groups"]))
        lab.stack.wait_until_ready(lab.client)
        lab.check(lab.start(SHORT), SHORT)
        lab.check_nothing_left()
        assert set(lab.stack.stop().values()) == {0}


def test_requests_of_a_compute_worker_that_is_cut_off_are_finished_by_its_successor(
    model: tuple[Path, PreTrainedModel], tmp_path: Path
) -> None:
    """With exactly the tokens that they would have had."""
    with _lab(tmp_path, model, heartbeat_s=HEARTBEAT_S) as lab:
        started = lab.start(LONG)
        lab.network.unplug("compute")
        assert lab.stack.processes["compute"].wait(PATIENCE_S) == 1
        assert "has been silent for 10 heartbeats" in lab.stack.last_words("compute")
        lab.network.plug("compute")
        lab.stack.start("compute")
        lab.check(started, LONG)
        lab.check_nothing_left()
        assert set(lab.stack.stop().values()) == {0}
