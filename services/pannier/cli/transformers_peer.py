"""transformers' static-batch `generate` as an engine to compare with, in a process of its own.

Reads one JSON object per line from stdin, and answers each with one line on stdout::

    {"prompts": [[token, ...], ...], "output": N}   ->   {"total_s": ..., "decode_s": ...}

All prompts of a request must be equally long: that is the static batch's best case, as nothing is padded.
"""

import json
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from pannier.runtime.model_source import resolve
from pannier.runtime.random_models import build


class Clock(StoppingCriteria):
    """Never stops; notes when each step was done."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:  # noqa: ARG002
        """Called by `generate` after every step."""
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def main(specification: str, dtype: str, threads: str) -> None:
    """Load the model, say so, then answer requests until stdin ends."""
    torch.set_num_threads(int(threads))
    model = _load(specification, getattr(torch, dtype))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(_generate(model, request["prompts"], request["output"])), flush=True)


def _load(specification: str, dtype: torch.dtype) -> PreTrainedModel:
    source = resolve(specification)
    model: PreTrainedModel
    if source.path is not None:
        model = AutoModelForCausalLM.from_pretrained(source.path, dtype=dtype).eval()
    else:
        assert source.shape is not None
        model = build(source.shape, source.seed, dtype)
    assert model.generation_config is not None
    model.generation_config.eos_token_id = None
    return model


def _generate(model: PreTrainedModel, prompts: list[list[int]], output: int) -> dict[str, float]:
    ids, clock = torch.tensor(prompts), Clock()
    started = time.perf_counter()
    with torch.inference_mode():
        result = model.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=output,
            min_new_tokens=output,
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([clock]),
        )
    assert result.shape == (len(prompts), len(prompts[0]) + output)
    return {"total_s": clock.times[-1] - started, "decode_s": clock.times[-1] - clock.times[0]}


if __name__ == "__main__":
    main(*sys.argv[1:])
