"""Stages: a model's slices in order on several compute workers, for a model that doesn't fit one of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from pannier.slicer.cut import Slice
from pannier.slicer.export import POSITIONS, ROWS


class TooManyStages(ValueError):
    """Raised when a model has fewer attention calls than it is to have stages."""


@dataclass(frozen=True)
class Stage:
    """Number `number` of `count` parts of a model, counted from 0."""

    number: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        """Whether it is given tokens, rather than what the stage before it has computed."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """Whether it has the model's head, and samples."""
        return self.number == self.count - 1


WHOLE = Stage()


def span_of(stage: Stage, slices: Sequence[Slice], weights: Mapping[str, torch.Tensor]) -> range:
    """Numbers of a stage's slices: the largest stage has as few bytes of weights as can be.

    All stages come to the same division, as long as they have the same model. Every stage has an attention call; the
    last slice belongs to the stage of the slice before it. Raises `TooManyStages`.
    """
    num_calls = len(slices) - 1
    if stage.count > num_calls:
        raise TooManyStages(f"{stage.count} stages are asked for, and the model has {num_calls} attention calls")
    sizes = _bytes_of_spans(slices, weights)

    @cache
    def starts(first: int, count: int) -> tuple[int, tuple[int, ...]]:
        """Bytes of the largest of `count` stages from slice `first` on, and where each of them starts."""
        if count == 1:
            return sizes[first][len(slices)], (first,)
        rest = [(stop, *starts(stop, count - 1)) for stop in range(first + 1, num_calls - count + 2)]
        return min((max(sizes[first][stop], largest), (first, *others)) for stop, largest, others in rest)

    _, division = starts(0, stage.count)
    ends = (*division[1:], len(slices))
    return range(division[stage.number], ends[stage.number])


def passed_on(slices: Sequence[Slice], first: int) -> tuple[str, ...]:
    """Names of the values that slices from `first` on need of those before, positions aside: every stage has them."""
    needed: set[str] = set()
    for piece in reversed(slices[first:]):
        needed -= {*piece.gives, piece.output}
        needed |= set(piece.takes) | (set(piece.result) - set(piece.gives))
    return tuple(sorted(needed - {POSITIONS, ROWS}))


def _bytes_of_spans(slices: Sequence[Slice], weights: Mapping[str, torch.Tensor]) -> list[list[int]]:
    """[first][stop]: of the weights of those slices, tied ones counted once."""
    table = []
    for first in range(len(slices)):
        seen: dict[int, int] = {}
        row = [0] * (first + 1)
        for piece in slices[first:]:
            seen |= {weights[name].data_ptr(): weights[name].nbytes for name in piece.weights}
            row.append(sum(seen.values()))
        table.append(row)
    return table
