"""What stands above the findings: element types by role, fallbacks that nobody announces, and where the time goes."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from pannier.audit.calls import is_product, name_of, streamed_bytes
from pannier.audit.device import Device
from pannier.audit.drive import DECODE, PREFILL
from pannier.audit.record import Recording
from pannier.audit.rules import Conversion, How, conversions_of
from pannier.audit.static import Graph

ATTENTION = "_scaled_dot_product"


@dataclass(frozen=True)
class Dtypes:
    """Element types by role; several where there are several."""

    storage: str
    """In files; empty where there are none."""
    parameters: str
    compute: str
    """Of most of what is multiplied."""
    kv: str
    wire: str
    """Of q, k and v, which Pannier would send."""
    logits: str


@dataclass(frozen=True)
class Budget:
    """Where the time of one decode step goes, in seconds; of a prompt where there are no decode steps."""

    phase: str
    step_s: float
    streamed: int
    """Bytes of weights, keys and values that must be read once."""
    streaming_s: float
    """The same at the device's bandwidth: no step can be shorter, unless a cache holds them."""
    conversion_s: float

    @property
    def unexplained_s(self) -> float:
        """What is neither: arithmetic, launches, Python."""
        return max(0.0, self.step_s - self.streaming_s - self.conversion_s)


def dtypes_of(recording: Recording, parameters: dict[str, int], storage: str) -> Dtypes:
    """The element types that were seen."""
    calls = recording.calls.get(DECODE, recording.calls[PREFILL])
    multiplied: Counter[str] = Counter()
    for call in filter(is_product, calls):
        largest = max(call.inputs, key=lambda value: value.elements)
        multiplied[name_of(largest.dtype)] += largest.elements
    attention = next((call for call in calls if call.op.startswith(ATTENTION)), None)
    compute = multiplied.most_common(1)[0][0] if multiplied else "none"
    return Dtypes(
        storage=storage,
        parameters=", ".join(sorted(parameters, key=lambda name: -parameters[name])),
        compute=compute,
        kv=", ".join(recording.cache_dtypes) or "none kept",
        wire=compute if attention is None else name_of(attention.inputs[0].dtype),
        logits=recording.logits_dtype,
    )


def attention_of(recording: Recording) -> str:
    """Which operator attends."""
    ops = [call.op for calls in recording.calls.values() for call in calls]
    found = sorted({op for op in ops if op.startswith(ATTENTION)})
    if found:
        return ", ".join(op.strip("_") for op in found)
    if recording.profile.fell_back_to_math:
        return "scaled_dot_product_attention_math"
    return "eager, by products and a softmax" if "_softmax" in ops else "none that is known"


def budget_of(recording: Recording, device: Device) -> Budget:
    """Where the time goes."""
    phase = DECODE if DECODE in recording.calls else PREFILL
    calls = recording.calls[phase]
    streamed = streamed_bytes(calls, recording.stored) + (recording.cache_bytes if phase == DECODE else 0)
    converting = [call for call in calls if any(each.how is not How.EMULATED for each in conversions_of(call))]
    conversion_s = sum(call.seconds for call in converting)
    return Budget(phase, recording.step_s(phase), streamed, streamed / device.bandwidth, conversion_s)


def fallbacks_of(
    recording: Recording, device: Device, compute: str, buffers: Iterable[tuple[str, torch.Tensor]]
) -> list[str]:
    """What runs otherwise than it seems, one sentence each."""
    found = emulation(device, compute)
    if device.cubin.startswith("none") or "compiled" in device.cubin:
        found.append(f"machine code for {device.capability} isn't in this torch ({device.cubin})")
    if recording.profile.fell_back_to_math:
        found.append("attention found no kernel of its own and multiplies all scores out (math)")
    if device.kind == "cpu" and compute in ("bfloat16", "float16") and not _onednn_takes(compute):
        found.append(f"oneDNN doesn't take {compute} on this processor: products use a plain loop")
    rounded = sorted({name_of(tensor.dtype) for name, tensor in buffers if name.endswith("inv_freq")} - {"float32"})
    if rounded:
        found.append(f"rotary frequencies are rounded to {rounded[0]}: long positions lose precision")
    return found


def emulation(device: Device, compute: str) -> list[str]:
    """Whether the device only seems to multiply what is multiplied, in a sentence."""
    if compute in device.native or compute == "none":
        return []
    return [f"{compute} is emulated: the device multiplies {', '.join(device.native)}"]


def profiler_says(recording: Recording) -> str:
    """Whether torch's profiler saw the same casts, in one sentence.

    It sees them as copies from one type to another. On a CPU promotion makes such copies too, on a GPU kernels promote.
    """
    phase = DECODE if DECODE in recording.calls else PREFILL
    found = [each for call in recording.calls[phase] for each in conversions_of(call)]
    casts = _by_types(each for each in found if each.how is How.EXPLICIT)
    promoted = casts + _by_types(each for each in found if each.how is How.PROMOTION)
    seen = recording.profile.copies
    if seen in (casts, promoted):
        beside = f" and {seen.total() - casts.total()} promotions" if seen != casts else ""
        return f"the profiler saw the same {casts.total()} casts{beside} in a {phase} pass"
    return f"the profiler saw other casts in a {phase} pass ({_difference(promoted, seen)})"


def graph_says(graph: Graph, recording: Recording) -> str:
    """Whether a traced model has the casts that were seen, in one sentence."""
    phase = DECODE if DECODE in recording.calls else PREFILL
    seen, traced = (
        _by_types(each for call in calls for each in conversions_of(call) if each.how is How.EXPLICIT)
        for calls in (recording.calls[phase], graph.calls(1))
    )
    if seen == traced:
        return f"the traced model has the same {seen.total()} casts"
    return f"the traced model has other casts ({_difference(seen, traced)})"


def _difference(here: Counter[tuple[str, str]], there: Counter[tuple[str, str]]) -> str:
    return ", ".join(
        f"{source} to {target}: {here[source, target]} here, {there[source, target]} there"
        for source, target in sorted(here.keys() | there.keys())
        if here[source, target] != there[source, target]
    )


def _by_types(conversions: Iterable[Conversion]) -> Counter[tuple[str, str]]:
    return Counter((name_of(each.source.dtype), name_of(each.target)) for each in conversions)


def _onednn_takes(compute: str) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    ask = "_is_mkldnn_bf16_supported" if compute == "bfloat16" else "_is_mkldnn_fp16_supported"
    return bool(getattr(torch.ops.mkldnn, ask)())
