"""Which element type K and V are stored in and which one links carry, from what attention workers compute natively."""

from collections.abc import Collection
from typing import NamedTuple

from pannier.wire import Dtype
from pannier.wire import messages as m


class Dtypes(NamedTuple):
    """Chosen once, when the first group is formed."""

    kv: Dtype
    """Of K and V in the blocks."""
    wire: Dtype
    """Of q, k, v and answers on links."""


def choose_dtypes(own: Dtype, wanted: Dtype | None, native: Collection[Dtype]) -> Dtypes:
    """For a model that computes in `own` and attention workers all of which compute `native`.

    K and V are stored in what is `wanted`; else in the model's own type where that is native, then in float16, which is
    as wide as bfloat16, then in float32. Links carry the narrower of the two types, the blocks' if they are equally
    wide: so it is the compute worker that rounds, before it sends, and attention workers at most widen.
    """
    kv = wanted or next((dtype for dtype in (own, Dtype.FLOAT16) if dtype in native), Dtype.FLOAT32)
    return Dtypes(kv, own if own in native and own.itemsize < kv.itemsize else kv)


def lacking(name: str, facts: m.AttentionFacts, needed: Collection[Dtype]) -> str | None:
    """In one sentence what an attention worker doesn't compute; None if it computes all that is needed."""
    for dtype in needed:
        if dtype not in facts.dtypes:
            natively = ", ".join(each.name.lower() for each in facts.dtypes)
            return (
                f"{name} ({facts.device}) computes {natively} natively, and not {dtype.name.lower()}, in which K and V "
                "are kept here: set kv_dtype to what all attention workers compute, or leave it at auto"
            )
    return None
