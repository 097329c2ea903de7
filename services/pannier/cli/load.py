"""What a measuring command asks of every engine: prompts and output lengths, equal ones or a trace's."""

import json
import random
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple, Self

from pannier.runtime.errors import ConfigError
from pannier.runtime.model_source import resolve

FIRST_TOKEN, LAST_TOKEN = 10, 4000
"""Prompts are drawn from these token ids (or fewer if the vocabulary is smaller), clear of special tokens."""


class Lengths(NamedTuple):
    """Tokens of one request."""

    prompt: int
    output: int


class Ask(NamedTuple):
    """One request: its prompt, and how many tokens must come."""

    prompt: list[int]
    output: int


@dataclass(frozen=True)
class Load:
    """Requests that are made all at once, greedy, end tokens ignored."""

    name: str
    lengths: tuple[Lengths, ...]

    @classmethod
    def equal(cls, requests: int, prompt: int, output: int) -> Self:
        """As many requests of one length."""
        return cls(f"{requests}x{prompt}+{output}", (Lengths(prompt, output),) * requests)

    @classmethod
    def of_trace(cls, path: Path, requests: int, max_length: int) -> Self:
        """The trace's first requests, all made shorter by one factor so that the longest has `max_length` tokens.

        One factor for all keeps them as unlike as they were. Raises `TraceError`, and `ConfigError` if it is too short.
        """
        from pannier.planner.trace import read_trace

        found = [Lengths(each.prompt_length, each.output_length) for each in islice(read_trace(path), requests)]
        if len(found) < requests:
            raise ConfigError(f"{path} has {len(found)} requests; --requests is {requests}")
        factor = min(1.0, max_length / max(map(sum, found)))
        lengths = tuple(Lengths(*(max(1, int(tokens * factor)) for tokens in each)) for each in found)
        tokens = f"{sum(each.prompt for each in lengths)}+{sum(each.output for each in lengths)}"
        return cls(f"{path.stem} {requests} requests, {tokens} tokens", lengths)

    def shortened(self, output: int) -> Self:
        """The same prompts with at most so many tokens each: to warm up with."""
        return replace(self, lengths=tuple(Lengths(each.prompt, min(each.output, output)) for each in self.lengths))

    def asks(self, repeat: int, vocab_size: int) -> list[Ask]:
        """The requests with random prompts, others for every repeat."""
        draw = random.Random(f"repeat {repeat}")  # of a number only the size counts: -1 would draw what 1 draws
        last = min(LAST_TOKEN, vocab_size - 1)
        return [
            Ask([draw.randint(min(FIRST_TOKEN, last), last) for _ in range(each.prompt)], each.output)
            for each in self.lengths
        ]


def vocab_size(model: str) -> int:
    """How many tokens a model knows, by its configuration."""
    source = resolve(model)
    if source.shape is not None:
        return source.shape.vocab_size
    assert source.path is not None
    config = json.loads((source.path / "config.json").read_text(encoding="utf-8"))
    size: int = config.get("text_config", config)["vocab_size"]
    return size
