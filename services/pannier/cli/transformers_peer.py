"""transformers as an engine to compare with, in a process of its own: `generate`, or its continuous batching.

Reads one JSON list of requests per line from stdin, and answers each with one JSON object on stdout::

    [[[token, ...], N], ...]   ->   {"arrivals": [[seconds, ...], ...], "settings": {...}}

For each request the seconds since the start at which its N tokens came; and how the engine is set. The first line on
stdout says that the model is loaded.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from pannier.cli.load import Ask
from pannier.cli.transformers_continuous import Continuous
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


class Static:
    """One batch that starts and ends together: shorter prompts are padded, and shorter outputs run on for nothing."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self.settings = {"batch": "all requests, padded to the longest"}

    def run(self, asks: list[Ask]) -> list[list[float]]:
        """When each request's tokens came."""
        longest, output = max(len(ask.prompt) for ask in asks), max(ask.output for ask in asks)
        padding = [longest - len(ask.prompt) for ask in asks]
        ids = torch.tensor([[0] * pad + ask.prompt for pad, ask in zip(padding, asks, strict=True)])
        mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in padding])
        clock, started = Clock(), time.perf_counter()
        result = self._model.generate(  # type: ignore[operator]
            ids,
            attention_mask=mask,
            max_new_tokens=output,
            min_new_tokens=output,
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([clock]),
        )
        assert result.shape == (len(asks), longest + output)
        return [[each - started for each in clock.times[: ask.output]] for ask in asks]


ENGINES: dict[str, Callable[[PreTrainedModel], Static | Continuous]] = {
    "transformers": Static,
    "transformers-continuous": Continuous,
}


def main(engine: str, specification: str, dtype: str, threads: str) -> None:
    """Load the model, say so, then answer requests until stdin ends."""
    answers, sys.stdout = sys.stdout, sys.stderr  # libraries may print; only answers may go where they are read
    torch.set_num_threads(int(threads))
    with torch.inference_mode():
        peer = ENGINES[engine](_load(specification, getattr(torch, dtype)))
        print(json.dumps({"ready": True}), file=answers, flush=True)
        for line in sys.stdin:
            arrivals = peer.run([Ask(*ask) for ask in json.loads(line)])
            print(json.dumps({"arrivals": arrivals, "settings": peer.settings}), file=answers, flush=True)


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


if __name__ == "__main__":
    main(*sys.argv[1:])
