"""A compute worker that is stopped in mid-step and continues when its blocks are others'."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from pannier.client import Client, Stream
from tests.e2e.models import VOCAB, save_random_model
from tests.e2e.stack import Stack, running_stack

BLOCK = 16
PROMPT, MAX_TOKENS = 24, 180
BLOCKS_OF_ONE = -(-(PROMPT + MAX_TOKENS) // BLOCK)
NUM_KEPT, NUM_CANCELLED, NUM_LATER = 2, 2, 2
BLOCKS = BLOCKS_OF_ONE * (NUM_KEPT + NUM_CANCELLED) + 1
"""Enough for those that run at first: what comes later needs the blocks of those that are cancelled."""
BYTES_OF_BLOCK = 3 * 2 * (16 + 16) * 4 * BLOCK
"""Layers, heads of the larger shard, sizes of K and V, fp32."""
PATIENCE_S = 60.0
MAX_ROUNDS = 8
"""Whether it sends something before it learns of its new session is a race; most often it does."""


def _prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    shape = (NUM_KEPT + NUM_CANCELLED + NUM_LATER, PROMPT)
    prompts: list[list[int]] = torch.randint(3, VOCAB, shape, generator=generator).tolist()
    return prompts


def _start(client: Client, prompts: list[list[int]]) -> list[tuple[Stream, list[int]]]:
    """Streams under way, each with the tokens that have come so far."""
    streams = [client.stream(p, max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True) for p in prompts]
    return [(stream, list(next(stream).tokens)) for stream in streams]


def _finish(stream: Stream, tokens: list[int]) -> list[int]:
    return tokens + [token for chunk in stream for token in chunk.tokens]


def _finish_all(streams: list[tuple[Stream, list[int]]]) -> list[list[int]]:
    with ThreadPoolExecutor(len(streams)) as pool:
        return list(pool.map(lambda each: _finish(*each), streams))


@contextmanager
def _stopped(stack: Stack, name: str) -> Iterator[Callable[[], None]]:
    """The process is stopped until what is yielded is called, at the latest until the end."""
    pid = stack.processes[name].pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        yield lambda: os.kill(pid, signal.SIGCONT)
    finally:
        os.kill(pid, signal.SIGCONT)


def _process(client: Client, name: str) -> dict[str, Any]:
    return next((each for each in client.status()["processes"] if each["name"] == name), {"standing": "unknown"})


def _stale_frames(client: Client) -> float:
    attentions = [each for each in client.status()["processes"] if each["role"] == "attention"]
    return sum(float(each["counters"].get("stale_frames", 0)) for each in attentions)


def _wait(what: str, holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, f"{what}: not within {PATIENCE_S:g} s"
        time.sleep(0.05)


def _serve_while_stopped(stack: Stack, client: Client, prompts: list[list[int]]) -> list[list[int]]:
    """Stop compute-0 in mid-step and let it continue while its blocks are others'; texts of all but the cancelled."""
    running = _start(client, prompts[:-NUM_LATER])
    session = _process(client, "compute-0")["session"]
    with _stopped(stack, "compute-0") as go_on:
        for stream, _ in running[NUM_KEPT:]:
            stream.close()
        _wait("compute-0 is fenced", lambda: _process(client, "compute-0")["standing"] == "lost")
        _wait("compute-1 is ready", lambda: _process(client, "compute-1")["standing"] == "ready")
        reusing = _start(client, prompts[-NUM_LATER:])
        go_on()
        _wait("compute-0 begins anew", lambda: _process(client, "compute-0")["standing"] == "ready")
    assert _process(client, "compute-0")["session"] > session
    return _finish_all(running[:NUM_KEPT] + reusing)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_compute_worker_that_was_stopped_in_mid_step_writes_nothing_late(tmp_path: Path) -> None:
    """It is fenced, another serves its requests and reuses its blocks; continued, it begins a new session."""
    save_random_model("llama", tmp_path / "model")
    prompts = _prompts()
    compute = {"dtype": "float32", "cache_dir": tmp_path / "cache"}
    with running_stack(
        tmp_path / "run",
        tmp_path / "model",
        compute=compute,
        attention={"memory": BLOCKS * BYTES_OF_BLOCK},
        block_size=BLOCK,
        max_sequences=8,
        heartbeat_s=0.3,
    ) as (stack, client):
        undisturbed = _finish_all(_start(client, prompts))
        stack.compute(tmp_path / "model", "compute-1", **compute)
        _wait("compute-1 is ready", lambda: _process(client, "compute-1")["standing"] == "ready")
        stale = _stale_frames(client)
        for _ in range(MAX_ROUNDS):
            disturbed = _serve_while_stopped(stack, client, prompts)
            assert disturbed == undisturbed[:NUM_KEPT] + undisturbed[-NUM_LATER:]
            if _stale_frames(client) > stale:
                break
        else:
            pytest.fail(f"no late frame in {MAX_ROUNDS} rounds: nothing was tried")
        assert _finish_all(_start(client, prompts)) == undisturbed
        group = client.status()["groups"]["0"]
    assert group["total"] < BLOCKS_OF_ONE * len(prompts)
    assert group["used"] == 0
