"""What to expect of a device that isn't here: the operators of a traced model, with times computed from its rates.

Each operator takes as long as its bytes at the device's bandwidth, or its arithmetic at the advertised rate if that is
more. A type that the device can't multiply is widened first: in the worst case, which is what is computed, every
operand is read, written in float32 and read again. A kernel that widens in registers loses none of that: so it is a
bound. Launches and the reading of keys and values are left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from pannier.audit.calls import Call, Origin, is_product, name_of
from pannier.audit.device import Device
from pannier.audit.drive import DECODE, PREFILL, Workload
from pannier.audit.record import Recording
from pannier.audit.static import Graph

WIDE = 4
"""Bytes of a number in float32."""


@dataclass(frozen=True)
class Target:
    """A device and its arithmetic.

    Attributes:
        device: with the bandwidth that is to be expected of it.
        flops: by element type, operations a second where they are known.
    """

    device: Device
    flops: Mapping[str, float]


def predicted(graph: Graph, target: Target, work: Workload) -> Recording:
    """A recording as if the model had run there."""
    calls = {
        phase: [replace(call, seconds=_seconds(call, target)) for call in graph.calls(rows)]
        for phase, rows in ((PREFILL, work.prompt), (DECODE, 1))
    }
    return Recording(
        work,
        seconds={phase: [sum(call.seconds for call in each)] for phase, each in calls.items()},
        calls=calls,
        stored=graph.stored,
        vocabulary=graph.vocabulary,
    )


def _seconds(call: Call, target: Target) -> float:
    if call.is_view or call.output is None:
        return 0.0
    values = [*call.inputs, call.output]
    if not is_product(call):
        gathered = call.op == "embedding"
        return sum(value.nbytes for value in (values[1:] if gathered else values)) / target.device.bandwidth
    nbytes = sum(value.nbytes for value in values)
    largest = max(call.inputs, key=lambda value: value.elements)
    dtype = name_of(largest.dtype)
    if largest.dtype.is_floating_point and largest.dtype not in target.device.native_types:
        nbytes += sum(2 * WIDE * value.elements for value in call.inputs if value.dtype == largest.dtype)
        dtype = "float32"
    rate = target.flops.get(dtype)
    arithmetic = 0.0 if rate is None else _operations(call) / rate
    return max(nbytes / target.device.bandwidth, arithmetic)


def _operations(call: Call) -> float:
    """Of a product with weights: two for every weight and row. Attention depends on what came before: none."""
    assert call.output is not None
    weights = [value for value in call.inputs if value.origin is Origin.WEIGHT and len(value.shape) > 1]
    rows = call.output.elements // call.output.shape[-1] if call.output.shape else 1
    return 2.0 * sum(value.elements for value in weights) * rows
