"""What a forward pass does, as a list of operator calls: seen in a run (`watch`), or read from a graph (`static`)."""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch


class Origin(StrEnum):
    """What a tensor's numbers come from."""

    WEIGHT = "weight"
    """Parameters and buffers, and what is computed from nothing else."""
    CACHE = "cache"
    """Keys and values that were kept, with or without those of the rows of this step."""
    OTHER = "activation"


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor without its numbers. `place` is where they lie (0: not known), `storage` what views of it share."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    origin: Origin = Origin.OTHER
    place: int = 0
    storage: int = 0

    @property
    def elements(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of them."""
        return self.elements * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an operator.

    Attributes:
        path: the module that makes it, with `*` for the number of a layer.
        op: the operator's name without overload.
        inputs: its tensors, in order.
        output: its first result; None if that is no tensor.
        pointwise: whether it goes through its inputs number by number.
        is_view: whether it moves nothing, but looks at its input in another way.
        seconds: how long it took; 0 where nothing was run.
    """

    path: str
    op: str
    inputs: tuple[Value, ...]
    output: Value | None
    pointwise: bool = False
    is_view: bool = False
    seconds: float = 0.0


PRODUCTS = re.compile(
    r"(add|badd)?b?mm|linear|matmul|(mk|one)dnn.*linear|convolution|_?grouped_mm|_scaled_dot_product.*|attend"
)
"""Operators that multiply, which is what a device has, or hasn't, units for."""
GATHERS = {"embedding", "index", "index_select", "gather", "select", "slice"}
"""Operators that read some of their first input."""


def is_product(call: Call) -> bool:
    """Whether it is a matrix product or attention."""
    return PRODUCTS.fullmatch(call.op) is not None


def origin_of(op: str, inputs: Sequence[Value], elements: int) -> Origin:
    """What an operator's result, which has so many elements, comes from."""
    if PRODUCTS.fullmatch(op):
        return Origin.OTHER
    if any(v.origin is Origin.CACHE and 2 * elements >= v.elements for v in inputs):
        return Origin.CACHE
    sources = inputs[:1] if op in GATHERS - {"embedding"} else inputs
    return Origin.WEIGHT if sources and all(v.origin is Origin.WEIGHT for v in sources) else Origin.OTHER


def fold(path: str) -> str:
    """A module's path with every number as `*`: `layers.7.mlp` is `layers.*.mlp`."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", path) or "(model)"


def streamed_bytes(calls: Iterable[Call], stored: frozenset[int]) -> int:
    """Bytes of weights that a step reads at least once, of the storages that hold the model's own."""
    read: dict[int, int] = {}
    for call in calls:
        if call.is_view:
            continue
        for value in call.inputs:
            if value.origin is Origin.WEIGHT and value.storage in stored:
                gathered = call.op in GATHERS and call.output is not None
                nbytes = call.output.nbytes if gathered and call.output is not None else value.nbytes
                read[value.place] = max(read.get(value.place, 0), nbytes)
    return sum(read.values())


def name_of(dtype: torch.dtype) -> str:
    """`bfloat16`, not `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")
