"""A request too long for the blocks of any group of attention workers, spread over several."""

from pathlib import Path

import pytest
import torch

from tests.e2e.check import Different, check_same
from tests.e2e.models import VOCAB, logprobs_after, logprobs_without_past, save_random_model
from tests.e2e.stack import running_stack

BLOCK = 16
BYTES_OF_BLOCK = 3 * 2 * (16 + 16) * 4 * BLOCK
"""Layers, heads of the larger shard, sizes of K and V, fp32."""
BLOCKS_OF_GROUP = 5
LENGTHS = ((100, 40), (130, 12), (70, 60))
"""Prompts and outputs: each longer than the 80 tokens of a group, not longer than both groups together."""


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("model_type", ["llama", "gpt_oss", "gemma2"])
def test_a_request_spread_over_two_groups_has_the_same_text(model_type: str, tmp_path: Path) -> None:
    """Also with windows and sinks; rows of both groups are merged, and the chunks end where a group does."""
    model = save_random_model(model_type, tmp_path / "model")
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length, _ in LENGTHS]
    with running_stack(
        tmp_path / "run",
        tmp_path / "model",
        attention_workers=4,  # three KV heads: two groups of two workers
        attention={"memory": BLOCKS_OF_GROUP * BYTES_OF_BLOCK},
        compute={"dtype": "float32", "cache_dir": tmp_path / "cache"},
        max_batch_tokens=32,
        max_sequences=8,
        block_size=BLOCK,
    ) as (_stack, client):
        assert {group["total"] for group in client.status()["groups"].values()} == {BLOCKS_OF_GROUP}
        completions = [
            client.complete(prompt, max_tokens=count, temperature=0.0, logprobs=20, ignore_eos=True)
            for prompt, (_, count) in zip(prompts, LENGTHS, strict=True)
        ]
        status = client.status()
    assert [group["used"] for group in status["groups"].values()] == [0, 0]
    for prompt, completion in zip(prompts, completions, strict=True):
        output = list(completion.tokens)
        check_same(completion.logprobs, logprobs_after(model, prompt, output))
        with pytest.raises(Different):
            check_same(completion.logprobs, logprobs_without_past(model, prompt, output))
