"""Same text, as the design defines it: identical greedy tokens up to ties, and the same top log-probabilities."""

from collections.abc import Sequence

import torch

from pannier.wire.messages import TokenLogprob

TOLERANCE = 1e-4


class Different(AssertionError):
    """The output is not what the reference says."""


def check_same(output: Sequence[TokenLogprob], expected: torch.Tensor) -> int:
    """Compare an output with reference log-probabilities [len(output), V]; returns the number of ties.

    Raises `Different` where a token is not among the reference's best within the tolerance, or one of the top
    log-probabilities differs by more.
    """
    if len(output) != len(expected):
        raise Different(f"{len(output)} tokens, expected {len(expected)}")
    ties = 0
    for place, (drawn, reference) in enumerate(zip(output, expected, strict=True)):
        best = float(reference.max())
        if not float(reference[drawn.token]) >= best - TOLERANCE:
            raise Different(f"token {place}: {drawn.token} has {float(reference[drawn.token])}, the best has {best}")
        ties += drawn.token != int(reference.argmax())
        _check_top(place, drawn, reference)
    return ties


def _check_top(place: int, drawn: TokenLogprob, reference: torch.Tensor) -> None:
    tokens = torch.tensor([top.token for top in drawn.top])
    ours = torch.tensor([top.logprob for top in drawn.top])
    by_token = (ours - reference[tokens]).abs().max()
    by_rank = (ours - reference.topk(len(tokens)).values).abs().max()
    if not max(float(by_token), float(by_rank)) <= TOLERANCE:
        raise Different(f"token {place}: top log-probabilities differ by {by_token:.2e} and {by_rank:.2e}")
