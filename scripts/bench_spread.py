#!/usr/bin/env python
"""A request that is longer than the blocks of any group of attention workers: is its text that of the uncut model?

    scripts/bench spread [--tokens 32000] [--outputs 32] [--json]

A small random Llama in fp32 through real processes: two groups, each with blocks for five eighths of the request. What
it says is compared with the uncut model's greedy tokens and top log-probabilities. Exit status 1 if they differ.
"""

import argparse
import json
import platform
import sys
import tempfile
import time
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, PreTrainedModel

sys.path.insert(0, str(Path(__file__).parent.parent))
from pannier.client import Completion
from tests.e2e.check import check_same
from tests.e2e.models import VOCAB, save_tokenizer
from tests.e2e.stack import running_stack

LAYERS, HEADS, KV_HEADS, HEAD_SIZE = 2, 4, 2, 16
BLOCK = 64
CHUNK = 512
BYTES_OF_BLOCK = LAYERS * (HEAD_SIZE + HEAD_SIZE) * 4 * BLOCK
"""One KV head: each group has two workers."""


def main() -> int:
    """Run, compare, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32_000, help="of the prompt")
    parser.add_argument("--outputs", type=int, default=32)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    options = parser.parse_args()
    generator = torch.Generator().manual_seed(5)
    prompt: list[int] = torch.randint(3, VOCAB, (options.tokens,), generator=generator).tolist()
    with tempfile.TemporaryDirectory() as folder:
        model = save_model(Path(folder) / "model", options.tokens + options.outputs)
        started = time.perf_counter()
        completion, blocks = complete(Path(folder), prompt, options.outputs)
        seconds = time.perf_counter() - started
    expected = logprobs_after(model, prompt, list(completion.tokens))
    ties = check_same(completion.logprobs, expected)  # raises where they differ
    print(f"{options.tokens} + {options.outputs} tokens over two groups of {blocks} blocks of {BLOCK} tokens each")
    print(f"the same {options.outputs} tokens and log-probabilities as the uncut model's, {ties} ties, {seconds:.1f} s")
    if options.json:
        row = {"case": f"{options.tokens} tokens", "engine": "offloaded", "metric": "ties", "value": ties, "unit": ""}
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        print(json.dumps({"command": sys.argv, "machine": platform.machine(), "versions": versions, "rows": [row]}))
    return 0


def save_model(folder: Path, longest: int) -> PreTrainedModel:
    """A random model with a window of `longest` tokens, saved; returned is the same, uncut."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HEADS * HEAD_SIZE,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=longest,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() >= 2:  # large enough that attention decides what comes next
                weight.normal_(0, 1.0 if "embed" in name else 0.25)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return model


def complete(folder: Path, prompt: list[int], num_outputs: int) -> tuple[Completion, int]:
    """The completion, and how many blocks each group has."""
    blocks = (len(prompt) + num_outputs) * 5 // 8 // BLOCK
    with running_stack(
        folder / "run",
        folder / "model",
        attention_workers=4,
        attention={"memory": blocks * BYTES_OF_BLOCK},
        compute={"dtype": "float32", "cache_dir": folder / "cache"},
        max_batch_tokens=CHUNK,
        block_size=BLOCK,
    ) as (_, client):
        totals = {group["total"] for group in client.status()["groups"].values()}
        assert totals == {blocks}, totals
        return client.complete(
            prompt, max_tokens=num_outputs, temperature=0.0, logprobs=20, ignore_eos=True, timeout_s=1800
        ), blocks


def logprobs_after(model: PreTrainedModel, prompt: list[int], output: list[int]) -> torch.Tensor:
    """[len(output), V]: what the uncut model says before each token of the output, computed in chunks."""
    tokens, cache = torch.tensor([prompt + output[:-1]]), DynamicCache(config=model.config)
    last: list[torch.Tensor] = []
    with torch.inference_mode():
        for start in range(0, tokens.shape[1], CHUNK):
            logits = model(tokens[:, start : start + CHUNK], past_key_values=cache, use_cache=True).logits[0]
            last.append(logits[max(0, len(prompt) - 1 - start) :])
    return torch.cat(last).float().log_softmax(-1)


if __name__ == "__main__":
    sys.exit(main())
