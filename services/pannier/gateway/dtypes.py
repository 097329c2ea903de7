"""Which element type K and V are stored in and which one links carry, from what attention workers compute natively."""

from collections.abc import Collection
from typing import NamedTuple

from pannier.runtime.dtype_policy import Choice, choose_kv, choose_wire
from pannier.wire import Dtype
from pannier.wire import messages as m


class Dtypes(NamedTuple):
    """Chosen once, when the first group is formed."""

    kv: Choice
    """Of K and V in the blocks."""
    wire: Choice
    """Of q, k, v and answers on links."""


def choose_dtypes(own: Dtype, wanted: Dtype | None, native: Collection[Dtype]) -> Dtypes:
    """For a model that computes in `own` and attention workers all of which compute `native`."""
    kv = choose_kv(own, wanted, native)
    return Dtypes(kv, choose_wire(own, kv.dtype, native))


def lacking(name: str, facts: m.AttentionFacts, needed: Collection[Dtype]) -> str | None:
    """In one sentence what an attention worker can't keep K and V in; None if it can in all that is needed."""
    for dtype in needed:
        if dtype not in facts.dtypes:
            able = ", ".join(each.name.lower() for each in facts.dtypes)
            return (
                f"{name} ({facts.device}) keeps K and V in {able}, and not in {dtype.name.lower()}, as they are kept "
                "here: set kv_dtype to what all attention workers can, or leave it at auto"
            )
    return None
