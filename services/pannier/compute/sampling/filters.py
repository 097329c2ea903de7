"""Likelihoods, and what top_k and min_p leave of them. (What top_p leaves is found by the race.)

Tokens that are equally likely stay or go together, so that what is left doesn't hang on the order of a sort: a token
stays if fewer than k are more likely; if it has min_p times the best one's likelihood; if those more likely than it
don't reach top_p of what is left by then.
"""

from collections.abc import Sequence

import torch

from pannier.wire import messages as m

_COLDEST, _HOTTEST = 1e-30, 1e30  # beyond them fp32 divides by 0, or makes 0 of -inf


def likelihoods(x: torch.Tensor, best: torch.Tensor, filters: Sequence[m.Filters]) -> torch.Tensor:
    """e^((x - best) / temperature) fp32 [B, V] in the place of logits x; the best [B, 1] becomes 1."""
    temperatures = [min(max(f.temperature, _COLDEST), _HOTTEST) for f in filters]
    return x.sub_(best).div_(_column(temperatures, x)).exp_()


def cut_top_k(p: torch.Tensor, filters: Sequence[m.Filters]) -> None:
    """Set to 0 what has k more likely tokens, in p [B, V]."""
    rows = [i for i, f in enumerate(filters) if 0 < f.top_k < p.shape[-1]]
    if rows:
        k = torch.tensor([filters[i].top_k for i in rows], device=p.device)
        # Not of all rows at once: those without a top_k would only cost.
        chosen = p if len(rows) == len(p) else p[rows]
        least = chosen.topk(int(max(filters[i].top_k for i in rows))).values.gather(1, k[:, None] - 1)
        limit = p.new_zeros(len(p), 1)
        limit[rows] = least
        p.masked_fill_(p < limit, 0)


def cut_min_p(p: torch.Tensor, filters: Sequence[m.Filters]) -> None:
    """Set to 0 what is less likely than min_p, in p [B, V] whose best are 1."""
    if any(f.min_p > 0 for f in filters):
        p.masked_fill_(p < _column([f.min_p for f in filters], p), 0)


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=like.device)[:, None]
