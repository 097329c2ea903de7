"""What comes through the processes is what transformers says, for many types of model."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from pannier.client import Client, Completion
from tests.e2e.check import Different, check_same
from tests.e2e.models import SHAPES, VOCAB, logprobs_after, logprobs_without_past, save_random_model
from tests.e2e.stack import running_stack

CHUNK = 16
LENGTHS = (3, 11, 16, 17, 29, 40, 53, 70)
"""Prompts shorter and longer than a chunk and than the window."""


def _prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in LENGTHS]


def _complete_all(client: Client, prompts: list[list[int]]) -> list[Completion]:
    def complete(numbered: tuple[int, list[int]]) -> Completion:
        number, prompt = numbered
        return client.complete(prompt, max_tokens=12 + number, temperature=0.0, logprobs=20, ignore_eos=True)

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(complete, enumerate(prompts)))


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("model_type", SHAPES)
def test_same_text_and_log_probabilities_as_transformers(model_type: str, tmp_path: Path) -> None:
    """8 requests at once, two lanes, two uneven shards, chunked prompts: the same text as the uncut model's."""
    model = save_random_model(model_type, tmp_path / "model")
    prompts = _prompts()
    with running_stack(
        tmp_path / "run",
        tmp_path / "model",
        compute={"dtype": "float32", "cache_dir": tmp_path / "cache"},
        max_batch_tokens=CHUNK,
        max_sequences=8,
        block_size=16,
    ) as (_stack, client):
        completions = _complete_all(client, prompts)
        status = client.status()
    heads = {process["name"]: process["heads"] for process in status["processes"] if process["role"] == "attention"}
    assert sorted(stop - start for ranges in heads.values() for start, stop in ranges) == [1, 2]
    assert all(lane["steps"] > 0 for lane in status["lanes"])
    assert all(group["used"] == 0 for group in status["groups"].values())
    ties = failures = 0
    for prompt, completion in zip(prompts, completions, strict=True):
        output = list(completion.tokens)
        ties += check_same(completion.logprobs, logprobs_after(model, prompt, output))
        with pytest.raises(Different):
            check_same(completion.logprobs, logprobs_without_past(model, prompt, output))
        failures += 1
    assert failures == len(prompts)
    assert ties == 0
