"""How far an engine's log-probabilities are from those of the model as transformers computes it, uncut."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp

import torch
from transformers import PreTrainedModel


@dataclass(frozen=True)
class Passage:
    """Tokens, and the natural-log probabilities of those from `start` on, each given all that are before it."""

    tokens: tuple[int, ...]
    start: int
    logprobs: tuple[float, ...]


@dataclass(frozen=True)
class Difference:
    """Of an engine's log-probabilities to a reference's, in nats, over the same tokens.

    Attributes:
        count: tokens.
        mean_logprob: of the engine.
        mean: how much higher the engine's are; a loss of quality is below 0.
        mean_absolute: how far they are apart, whichever is higher.
        largest: the same of the worst token.
    """

    count: int
    mean_logprob: float
    mean: float
    mean_absolute: float
    largest: float

    @property
    def perplexity(self) -> float:
        """Of the engine."""
        return exp(-self.mean_logprob)


def windows(tokens: Sequence[int], length: int, most: int) -> list[tuple[int, ...]]:
    """The beginning of a text, `most` tokens, in windows of a length; the last one may be shorter."""
    starts = range(0, min(most, len(tokens)), length)
    return [window for start in starts if len(window := tuple(tokens[start : min(start + length, most)])) > 1]


def scored(model: PreTrainedModel, passages: Sequence[tuple[Sequence[int], int]]) -> list[Passage]:
    """What an uncut model says of (tokens, start): one passage at a time, whole."""
    found = []
    with torch.inference_mode():
        for tokens, start in passages:
            ids = torch.tensor([tokens], device=model.device)
            logits = model(input_ids=ids, use_cache=False).logits[0, start - 1 : -1].float()
            own = logits.log_softmax(-1).gather(-1, ids[0, start:, None])[:, 0]
            found.append(Passage(tuple(tokens), start, tuple(own.tolist())))
    return found


def difference(engine: Sequence[Passage], reference: Sequence[Passage]) -> Difference:
    """Of two engines that scored the same passages. Raises `ValueError` if they are not the same."""
    if [(each.tokens, each.start) for each in engine] != [(each.tokens, each.start) for each in reference]:
        raise ValueError("the engines scored different tokens")
    ours = torch.tensor([logprob for each in engine for logprob in each.logprobs], dtype=torch.float64)
    theirs = torch.tensor([logprob for each in reference for logprob in each.logprobs], dtype=torch.float64)
    apart = ours - theirs
    return Difference(
        len(ours), float(ours.mean()), float(apart.mean()), float(apart.abs().mean()), float(apart.abs().max())
    )
