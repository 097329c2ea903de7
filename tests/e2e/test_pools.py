"""Pools of several workers of each kind: the text is the same, however the model and its cache are divided."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from threading import Event
from typing import Any

import pytest
import torch

from pannier.client import Client, Completion
from tests.e2e.check import Different, check_same
from tests.e2e.models import VOCAB, logprobs_after, logprobs_without_past, save_random_model
from tests.e2e.stack import running_stack

LENGTHS = (3, 11, 16, 17, 29, 40, 53, 70)
LONG_OUTPUT = 100
CLIENTS = 4
WAIT_S = 60.0


def _prompts(seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in LENGTHS]


def _complete(client: Client, prompt: list[int], max_tokens: int) -> Completion:
    return client.complete(prompt, max_tokens=max_tokens, temperature=0.0, logprobs=20, ignore_eos=True)


def _check(model: Any, prompts: list[list[int]], completions: list[Completion]) -> None:
    for prompt, completion in zip(prompts, completions, strict=True):
        output = list(completion.tokens)
        assert check_same(completion.logprobs, logprobs_after(model, prompt, output)) == 0
        with pytest.raises(Different):
            check_same(completion.logprobs, logprobs_without_past(model, prompt, output))


def _wait_for(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not what():
        assert time.monotonic() < deadline, "it does not come to be"
        time.sleep(0.05)


def _status_at_rest(client: Client) -> dict[str, Any]:
    """The status once no block is used: steps that were planned ahead are done a moment after the last text is here."""
    _wait_for(lambda: all(group["used"] == 0 for group in client.status()["groups"].values()))
    return client.status()


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("model_type", "stages"), [("llama", 2), ("gpt2", 2), ("gemma3_text", 2), ("gpt_oss", 2), ("gpt_oss", 3)]
)
def test_stages_groups_and_uneven_shards_at_once(model_type: str, stages: int, tmp_path: Path) -> None:
    """A lane for every stage and more, two groups of two uneven shards each: what transformers says."""
    model = save_random_model(model_type, tmp_path / "model")
    prompts = _prompts(1)
    with (
        running_stack(
            tmp_path / "run",
            tmp_path / "model",
            attention_workers=4,
            stages=stages,
            compute={"dtype": "float32", "cache_dir": tmp_path / "cache"},
            max_batch_tokens=16,
            max_sequences=8,
            block_size=16,
        ) as (_stack, client),
        ThreadPoolExecutor(len(prompts)) as pool,
    ):
        _wait_for(lambda: len(client.status()["groups"]) == 2)
        completions = list(pool.map(lambda n: _complete(client, prompts[n], 12 + n), range(len(prompts))))
        status = _status_at_rest(client)
    assert len(status["lanes"]) == 2 * stages
    assert all(lane["steps"] > 0 for lane in status["lanes"])
    assert all(group["cached"] > 0 for group in status["groups"].values()), "both had work"
    processes = {process["name"]: process for process in status["processes"]}
    calls = [processes[f"compute-{n}"]["stage"] for n in range(stages)]
    assert [(each["number"], each["count"]) for each in calls] == [(n, stages) for n in range(stages)]
    _check(model, prompts, completions)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_workers_come_and_go_while_requests_run(tmp_path: Path) -> None:
    """New ones get work without a restart; then the old ones leave, and what they held is computed anew."""
    model = save_random_model("llama", tmp_path / "model")
    compute = {"dtype": "float32", "cache_dir": tmp_path / "cache"}
    enough = Event()
    with (
        running_stack(
            tmp_path / "run",
            tmp_path / "model",
            compute=compute,
            max_batch_tokens=16,
            max_sequences=8,
            block_size=16,
            heartbeat_s=0.5,
        ) as (stack, client),
        ThreadPoolExecutor(CLIENTS) as pool,
    ):

        def ask_on(number: int) -> list[tuple[list[int], Completion]]:
            chance, answered = Random(number), []
            while not enough.is_set():
                prompt = [chance.randrange(3, VOCAB) for _ in range(chance.randrange(3, 70))]
                answered.append((prompt, _complete(client, prompt, LONG_OUTPUT)))
            return answered

        def has_steps(name: str) -> bool:
            counters = {each["name"]: each["counters"] for each in client.status()["processes"] if "counters" in each}
            return bool(counters.get(name, {}).get("steps", 0) > 0)

        clients = [pool.submit(ask_on, number) for number in range(CLIENTS)]
        try:
            _wait_for(lambda: has_steps("attention-1"))
            stack.compute(tmp_path / "model", "compute-1", **compute)
            stack.attention("attention-2", memory=256 << 20)  # where more is free, new sequences go
            _wait_for(lambda: has_steps("compute-1") and has_steps("attention-2"))
            for name in ("compute-0", "attention-0"):
                leaver = stack.processes.pop(name)
                leaver.terminate()
                leaver.join(WAIT_S)
                assert leaver.exitcode == 0
            time.sleep(1.0)
        finally:
            enough.set()
        answered = [each for client_ in clients for each in client_.result()]
        _status_at_rest(client)
    assert len(answered) > CLIENTS
    _check(model, [prompt for prompt, _ in answered], [completion for _, completion in answered])
