"""Draws are a function of seed, sample and position: wherever, whenever and beside whatever else they are made."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from pannier.client import Client, Completion
from tests.e2e.models import VOCAB, save_random_model
from tests.e2e.stack import Stack

NUM_PROMPTS, PROMPT, MAX_TOKENS = 3, 20, 80
KILL_AFTER = 12
"""Tokens of the first output."""


def _prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(4)
    prompts: list[list[int]] = torch.randint(3, VOCAB, (count, PROMPT), generator=generator).tolist()
    return prompts


@contextmanager
def _stack(tmp_path: Path, num_compute: int) -> Iterator[tuple[Stack, Client]]:
    """A ready stack of so many compute workers, in fp32, and two attention workers."""
    save_random_model("llama", tmp_path / "model")
    (tmp_path / "run").mkdir()
    stack = Stack(tmp_path / "run")
    stack.gateway(
        tmp_path / "model", compute_workers=num_compute, attention_workers=2, heartbeat_s=0.3, max_sequences=64
    )
    for number in range(num_compute):
        stack.compute(tmp_path / "model", f"compute-{number}", dtype="float32", cache_dir=tmp_path / "cache")
    for number in range(2):
        stack.attention(f"attention-{number}")
    try:
        with Client(stack.endpoint, connect_timeout_s=90) as client:
            stack.wait_until_ready(client)
            yield stack, client
    finally:
        stack.stop()


def _complete(client: Client, prompt: list[int], seed: int, n: int) -> Completion:
    return client.complete(
        prompt,
        n=n,
        seed=seed,
        temperature=1.0,
        top_p=0.9,
        repetition_penalty=1.3,
        frequency_penalty=0.2,
        presence_penalty=0.1,
        max_tokens=MAX_TOKENS,
        ignore_eos=True,
    )


def _tokens(completion: Completion) -> list[tuple[int, ...]]:
    return [output.tokens for output in completion.outputs]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_steps_repeated_on_another_compute_worker_draw_the_same_tokens(tmp_path: Path) -> None:
    """With penalties, seeds and four outputs of each prompt, whose sampler states die with the worker."""
    prompts = _prompts(NUM_PROMPTS)
    with _stack(tmp_path, num_compute=2) as (stack, client), ThreadPoolExecutor(NUM_PROMPTS) as pool:
        undisturbed = [_tokens(each) for each in pool.map(lambda i: _complete(client, prompts[i], i, 4), range(3))]
        under_way = [pool.submit(_complete, client, prompts[i], i, 4) for i in range(NUM_PROMPTS)]
        with client.stream(prompts[0], max_tokens=KILL_AFTER, ignore_eos=True) as chunks:
            list(chunks)
        lanes = {lane["worker"] for lane in client.status()["lanes"] if lane["steps"]}
        assert lanes == {"compute-0", "compute-1"}, "both draw"
        assert not any(each.done() for each in under_way)
        pid = stack.processes["compute-1"].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        disturbed = [_tokens(each.result(timeout=90)) for each in under_way]
    assert disturbed == undisturbed
    assert len({tokens for outputs in undisturbed for tokens in outputs}) == 4 * NUM_PROMPTS, "no two drew alike"


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_seeded_draws_are_the_same_alone_and_among_32(tmp_path: Path) -> None:
    prompts = _prompts(32)
    with _stack(tmp_path, num_compute=1) as (_, client), ThreadPoolExecutor(32) as pool:
        together = list(pool.map(lambda i: _tokens(_complete(client, prompts[i], i, 1)), range(32)))
        alone = [_tokens(_complete(client, prompts[i], i, 1)) for i in range(0, 32, 4)]
    assert alone == together[::4]
