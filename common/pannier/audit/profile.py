"""A second opinion, by torch's profiler: how many copies change the element type, and what a GPU's kernels do."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity

from pannier.audit.calls import name_of

SPELLINGS = {
    "float": "float32",
    "double": "float64",
    "c10::BFloat16": "bfloat16",
    "c10::Half": "float16",
    "c10::Float8_e4m3fn": "float8_e4m3fn",
    "c10::Float8_e5m2": "float8_e5m2",
    "long int": "int64",
    "int": "int32",
    "short int": "int16",
    "signed char": "int8",
    "unsigned char": "uint8",
    "bool": "bool",
}
"""Element types as the profiler spells them."""
COPY, MATH_ATTENTION = "aten::copy_", "aten::_scaled_dot_product_attention_math"


@dataclass
class Profile:
    """What the profiler saw of one forward pass.

    Attributes:
        copies: (from, to) of copies that change the type -> how many.
        operators: names of all operators that ran, inside others too.
        kernel_s: what a GPU's kernels did -> seconds; empty on a CPU.
    """

    copies: Counter[tuple[str, str]] = field(default_factory=Counter)
    operators: Counter[str] = field(default_factory=Counter)
    kernel_s: dict[str, float] = field(default_factory=dict)

    @property
    def fell_back_to_math(self) -> bool:
        """Whether attention found no kernel of its own."""
        return MATH_ATTENTION in self.operators


@contextmanager
def profiled(device: torch.device, into: Profile) -> Iterator[None]:
    """Profile what runs inside."""
    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * (device.type == "cuda")]
    with torch.profiler.profile(activities=activities, record_shapes=True) as profile:
        yield
    kernels: list[tuple[str, float]] = []
    for event in profile.profiler.kineto_results.events():
        if event.device_type() == DeviceType.CPU:
            into.operators[event.name()] += 1
            if event.name() == COPY and (pair := _changed(event)) is not None:
                into.copies[pair] += 1
        else:
            kernels.append((event.name(), event.duration_ns() * 1e-9))
    into.kernel_s = by_purpose(kernels)


def by_purpose(kernels: list[tuple[str, float]]) -> dict[str, float]:
    """Seconds of kernels by what they are for: the first pattern of `kernels.json` that fits, else `other`."""
    seconds: dict[str, float] = {}
    for name, each in kernels:
        purpose = next((purpose for pattern, purpose in _patterns().items() if re.search(pattern, name)), "other")
        seconds[purpose] = seconds.get(purpose, 0.0) + each
    return seconds


def _changed(copy: "torch._C._autograd._KinetoEvent") -> tuple[str, str] | None:
    """(from, to) of a copy that converts, of more than a number."""
    (target, source), shapes = copy.dtypes()[:2], copy.shapes()
    names = SPELLINGS.get(source, source), SPELLINGS.get(target, target)
    is_float = any(name_of(dtype) in names for dtype in FLOATS)
    return names if names[0] != names[1] and shapes[0] and is_float else None


FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)


@cache
def _patterns() -> Mapping[str, str]:
    found: dict[str, str] = json.loads((files("pannier.audit") / "kernels.json").read_text())["patterns"]
    return found
