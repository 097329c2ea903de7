"""Which conversions between element types an operator makes: asked for, by promotion, or of its own accord."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import torch

from pannier.audit.calls import Call, Value, is_product

CASTS = {"_to_copy", "to", "type_as", "copy_", "copy", "clone"}
REINTERPRETS = {"view", "view_as_complex", "view_as_real", "set_"}


class How(StrEnum):
    """Who wants a conversion."""

    EXPLICIT = "explicit"
    """A cast."""
    PROMOTION = "promotion"
    """Operands of two types meet."""
    OPERATOR = "operator"
    """An operator gives another type than it takes."""
    EMULATED = "emulated"
    """The device can't multiply this type, so its kernels widen it first."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """One tensor whose numbers are converted in one call."""

    call: Call
    source: Value
    target: torch.dtype
    how: How

    @property
    def nbytes(self) -> int:
        """What is read and written."""
        return self.source.elements * (self.source.dtype.itemsize + self.target.itemsize)


def conversions_of(call: Call) -> list[Conversion]:
    """The conversions of one call; what has a single element is none."""
    return [Conversion(call, source, target, how) for source, target, how in _found(call) if source.shape]


def emulated_in(call: Call, native: frozenset[torch.dtype]) -> Conversion | None:
    """What a product has to widen on a device that multiplies `native` types: its largest operand."""
    if not is_product(call) or not call.inputs:
        return None
    largest = max(call.inputs[:3], key=lambda value: value.elements)
    if not largest.dtype.is_floating_point or largest.dtype in native:
        return None
    return Conversion(call, largest, torch.float32, How.EMULATED)


def _found(call: Call) -> Iterator[tuple[Value, torch.dtype, How]]:
    output = call.output
    if output is None or not call.inputs or _makes_its_own(call.op):
        return
    if call.op in CASTS:
        into = call.op in ("copy_", "copy") and len(call.inputs) > 1
        source, target = call.inputs[into], (call.inputs[0].dtype if into else output.dtype)
        if source.dtype != target and (source.dtype.is_floating_point or target.is_floating_point):
            yield source, target, How.EXPLICIT
        return
    if output.dtype.is_floating_point:
        yield from _in_arithmetic(call, output.dtype)


def _in_arithmetic(call: Call, target: torch.dtype) -> Iterator[tuple[Value, torch.dtype, How]]:
    # A tensor without dimensions counts as a number, which promotes nothing.
    floats = [value for value in call.inputs if value.dtype.is_floating_point and value.shape]
    if call.pointwise:
        for value in call.inputs:
            if value.shape and not value.dtype.is_floating_point and value.dtype != torch.bool:
                yield value, target, How.PROMOTION
    if any(value.dtype == target for value in floats):
        for value in floats:
            if value.dtype != target:
                yield value, target, How.PROMOTION
    elif floats:
        yield max(floats, key=lambda value: value.elements), target, How.OPERATOR


def _makes_its_own(op: str) -> bool:
    """Whether its result has nothing of its inputs' numbers, or the very same bytes."""
    return op.startswith("new_") or op.endswith("_like") or op in REINTERPRETS
