"""What is to be done about a conversion."""

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

import torch

from pannier.audit.bound import Size
from pannier.audit.calls import name_of
from pannier.audit.rules import How

MATERIAL = 0.01
"""What is sized like weights, cache or vocabulary and takes less of a step is left alone."""
FUSABLE = 0.1
"""What activations' conversions at one place must take of a step to be worth a fused operator."""


class Verdict(StrEnum):
    """In the order in which they are reported."""

    FIX = "fix"
    FUSE = "fuse"
    KEEP = "keep"

    @property
    def rank(self) -> int:
        """0 for what comes first."""
        return list(Verdict).index(self)


@dataclass(frozen=True)
class Case:
    """What a verdict depends on."""

    size: Size
    how: How
    source: torch.dtype
    target: torch.dtype
    share: float
    """The part of a step's time that it takes, with all others of its kind."""
    rows_too_many: bool = False
    """Logits of rows that nobody samples from are converted too."""


@dataclass(frozen=True)
class Judgement:
    """A verdict and, in a few words, what to do or why not."""

    verdict: Verdict
    reason: str


def judge(case: Case, *, goes_with: bool, native: Collection[str]) -> Judgement:
    """The verdict.

    Args:
        goes_with: weights are converted between the same types at the same place.
        native: element types that the device multiplies without converting them.
    """
    if goes_with:
        return Judgement(Verdict.FIX, "goes with the weights that are converted here")
    if case.size is Size.ACTIVATION:
        if case.share >= FUSABLE:
            return Judgement(
                Verdict.FUSE, "one operator for what is done to the converted values, which stays as precise"
            )
        return Judgement(Verdict.KEEP, "precision")
    if case.size is Size.VOCABULARY and not case.rows_too_many:
        return Judgement(Verdict.KEEP, "precision: of the rows that are sampled from")
    if case.share < MATERIAL:
        return Judgement(Verdict.KEEP, f"takes less than {MATERIAL:.0%} of the time")
    return Judgement(Verdict.FIX, _remedy(case, native))


def native_instead(native: Collection[str]) -> str:
    """What to use for a type that a device can't multiply."""
    return "float16" if "float16" in native else "float32"


def _remedy(case: Case, native: Collection[str]) -> str:
    if case.how is How.EMULATED:
        instead = native_instead(native)
        proviso = ", if its range is enough" if instead == "float16" else ""
        return f"the device can't multiply {name_of(case.source)}: use {instead}{proviso}"
    match case.size:
        case Size.WEIGHT:
            return f"store the weights in {name_of(case.target)}, converted once"
        case Size.CACHE:
            return f"keep keys and values in {_narrower(case)}, and compute with them in it"
        case _:
            return "compute logits of the last row only"


def _narrower(case: Case) -> str:
    return name_of(min(case.source, case.target, key=lambda dtype: dtype.itemsize))
