"""The draw: every token has a clock that rings after an exponentially distributed time, the likelier the sooner.

The first one to ring is drawn, with its softmax probability. Where two computations of the same logits differ in their
last bits, another token is drawn only if two clocks ring at the same time to as many digits; picking the token where
the running sum of probabilities passes a random number would add up all those differences.
"""

from collections.abc import Sequence

import torch

from pannier.compute.sampling.noise import exponentials, key
from pannier.wire import messages as m

_LEAST_SHARE = 1e-30  # fp32 may make 0 of less, and then not even the likeliest token would stay


def keys_of(samples: Sequence[m.Sample]) -> torch.Tensor:
    """What fixes each sample's clocks, int32 [B, 2]."""
    keys = [key((sample.seed, sample.index, sample.position)) for sample in samples]
    return torch.tensor(keys, dtype=torch.int64).view(torch.int32).view(-1, 2)


def race(p: torch.Tensor, keys: torch.Tensor, filters: Sequence[m.Filters]) -> torch.Tensor:
    """Tokens int64 [B], drawn from likelihoods p fp32 [B, V], within the top_p of each row."""
    speeds = p / exponentials(keys, p.shape[-1])
    tokens = speeds.argmax(-1)
    if any(f.top_p < 1 for f in filters):
        shares = [max(f.top_p, _LEAST_SHARE) if f.top_p < 1 else torch.inf for f in filters]
        top_p = torch.tensor(shares, device=p.device)
        _stay_within(p, speeds, tokens, p.sum(-1) * top_p)
    return tokens


def _stay_within(p: torch.Tensor, speeds: torch.Tensor, tokens: torch.Tensor, mass: torch.Tensor) -> None:
    """Replace winners [B] that are not among the likeliest tokens that reach `mass` [B] by the next who are.

    The clocks are the same whoever takes part, so this is the race between those alone. Most winners are among them
    already, which one sum tells: no row is sorted. If one isn't, neither is any token as unlikely, so few rounds do.
    """
    left = torch.arange(len(p), device=p.device)
    while True:
        chosen = p.gather(1, tokens[left, None])
        above = torch.where(p > chosen, p, 0).sum(-1)
        out = (above >= mass).nonzero()[:, 0]
        if not len(out):
            return
        left, p, mass, chosen = left[out], p[out], mass[out], chosen[out]
        speeds = speeds[out].masked_fill_(p <= chosen, -1)
        tokens[left] = speeds.argmax(-1)
