"""A published figure beside ours."""

from dataclasses import dataclass
from enum import Enum


class Outcome(Enum):
    """What became of a published figure."""

    EXACT = "exact"
    REPRODUCED = "reproduced"
    NOT_REPRODUCED = "not reproduced"
    NOT_DERIVABLE = "not derivable"
    """It depends on what the publication doesn't say."""
    OURS = "ours only"
    """The publication has it in a plot at most."""


@dataclass(frozen=True)
class Check:
    """One figure, or a range of them."""

    what: str
    published: str
    ours: str
    outcome: Outcome
    why: str = ""


def exact(what: str, published: float, ours: float, digits: int = 2) -> Check:
    """The same to so many decimals."""
    same = round(ours, digits) == round(published, digits)
    return Check(what, f"{published:g}", f"{ours:.{digits}f}", Outcome.EXACT if same else Outcome.NOT_REPRODUCED)


def within(what: str, published: float, ours: float, tolerance: float, why: str = "") -> Check:
    """The same but for a share of it."""
    off = ours / published - 1
    outcome = Outcome.REPRODUCED if abs(off) <= tolerance else Outcome.NOT_REPRODUCED
    return Check(what, f"{published:g}", f"{ours:.4g} ({off:+.1%})", outcome, why)
