"""Draws by the hundred thousand, and how far their counts are from what they should be."""

from collections.abc import Sequence

import torch

from pannier.compute.sampling import State, draw
from pannier.wire import messages as m

NO_MASKS = torch.empty(0, 0, dtype=torch.int32)


def sample(
    position: int = 0,
    filters: m.Filters | None = None,
    *,
    seed: int = 0,
    index: int = 0,
    top: int = -1,
    sequence: int = 0,
    mask: int = -1,
) -> m.Sample:
    """A sample of row 0, at temperature 1 unless told otherwise."""
    return m.Sample(0, sequence, position, index, seed, filters or m.Filters(1.0), top, 0, mask)


def tokens(
    samples: Sequence[m.Sample],
    logits: torch.Tensor,
    states: Sequence[State | None] | None = None,
    masks: torch.Tensor = NO_MASKS,
) -> list[int]:
    """One draw per sample, all from the same logits [V], or each from its row of [samples, V]."""
    many = logits.ndim == 2
    rows = list(range(len(samples))) if many else [0] * len(samples)
    drawn = draw(logits if many else logits[None], rows, samples, states or [None] * len(samples), masks)
    assert drawn.dtype == torch.int64
    listed: list[int] = drawn.tolist()
    return listed


def far_off(drawn: Sequence[int], probabilities: torch.Tensor) -> float:
    """Chi-square in its own standard deviations; infinite where something was drawn that can't be."""
    counts = torch.tensor(drawn).bincount(minlength=len(probabilities)).double()
    expected = probabilities.double() * len(drawn)
    if counts[expected == 0].any():
        return float("inf")
    rare = expected < 5  # counted as one
    pairs = [(counts[~rare], expected[~rare]), (counts[rare].sum()[None], expected[rare].sum()[None])]
    chi_square = sum(float(((count - mean) ** 2 / mean)[mean > 0].sum()) for count, mean in pairs)
    freedom = int((~rare).sum()) - (not bool(expected[rare].sum()))
    deviation: float = max(1, 2 * freedom) ** 0.5
    return (chi_square - freedom) / deviation
