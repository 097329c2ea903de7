"""The most that removing a conversion can gain: its own time, and that of what only runs because of it.

A conversion keeps something in two types. Once it is gone the wider one needn't be there, so what moves or multiplies
it (an fp32 cache that is appended to, fp32 logits of rows that nobody asked for) may take less time too. Hence a bound
and no promise.
"""

from collections.abc import Iterable, Sequence
from enum import StrEnum
from functools import cache
from statistics import median
from typing import NamedTuple

import torch

from pannier.audit.calls import Call, Origin, Value
from pannier.audit.clock import Clock
from pannier.audit.rules import Conversion, conversions_of

MAPPED_BYTES = 8 << 20
"""Memory of this size and more may be mapped anew for every tensor, and unmapped behind it."""


class Size(StrEnum):
    """What a conversion grows with."""

    WEIGHT = "weight"
    CACHE = "cache"
    VOCABULARY = "vocabulary"
    ACTIVATION = "activation"


def size_of(value: Value, vocabulary: int) -> Size:
    """What a converted tensor grows with. A norm's vector of weights is no larger than an activation."""
    if value.origin is Origin.WEIGHT and sum(size > 1 for size in value.shape) > 1:
        return Size.WEIGHT
    if value.origin is Origin.CACHE:
        return Size.CACHE
    is_logits = value.origin is Origin.OTHER and len(value.shape) > 1 and value.shape[-1] == vocabulary
    return Size.VOCABULARY if is_logits else Size.ACTIVATION


def own_s(conversions: Iterable[Conversion], *, on_cpu: bool) -> float:
    """Seconds of the calls that convert, and of giving back the memory of what they made."""
    calls = {id(each.call): each for each in conversions}.values()
    released = sum(release_s(each.source.elements * each.target.itemsize) for each in calls) if on_cpu else 0.0
    return sum(each.call.seconds for each in calls) + released


def tied_s(conversions: Sequence[Conversion], calls: Iterable[Call], logits: "Logits") -> float:
    """Seconds of these calls that may be saved with conversions of one kind, the converting calls left out."""
    example = conversions[0]
    size, pair = size_of(example.source, logits.vocabulary), {example.source.dtype, example.target}
    converting = {id(each.call) for each in conversions}
    others = [call for call in calls if id(call) not in converting and not call.is_view]
    match size:
        case Size.ACTIVATION:
            return 0.0
        case Size.VOCABULARY:
            rows = example.source.elements // logits.vocabulary
            seconds = sum(call.seconds for call in others if _has(call, size, pair, logits))
            return seconds * max(0, rows - logits.wanted_rows) / rows
        case _:
            # All of it, not the wider half: what is half as large may fit into a cache that the whole doesn't fit into.
            wide = max(pair, key=lambda dtype: dtype.itemsize)
            seconds = sum(call.seconds for call in others if _has(call, size, {wide}, logits))
    if size is Size.WEIGHT:
        # Weights in the other type make activations that too, and what was converted between the two needn't be.
        seconds += sum(call.seconds for call in others if _converts_between(call, pair))
    return seconds


class Logits(NamedTuple):
    """Of one row, and how many rows' are wanted."""

    vocabulary: int
    wanted_rows: int


def _has(call: Call, size: Size, dtypes: set[torch.dtype], logits: Logits) -> bool:
    values = [*call.inputs, *([call.output] if call.output is not None else [])]
    return any(value.dtype in dtypes and size_of(value, logits.vocabulary) is size for value in values)


def _converts_between(call: Call, pair: set[torch.dtype]) -> bool:
    return any({each.source.dtype, each.target} == pair for each in conversions_of(call))


@cache
def release_s(nbytes: int) -> float:
    """Seconds to give memory back, measured; 0 for what the allocator keeps."""
    if nbytes < MAPPED_BYTES:
        return 0.0
    taken = []
    for _ in range(3):
        block = torch.ones(nbytes, dtype=torch.uint8)
        started = Clock.now()
        del block
        taken.append(Clock.now() - started)
    return median(taken)
