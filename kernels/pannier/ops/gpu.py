"""Which form the operators take on a GPU, decided once for each device.

Triton's, unless it is missing or PANNIER_GPU_FORM names another one: `torch`, or `flashinfer` (the extra of that name),
whose kernels then do what they can of `paged_attention`; the other operators stay Triton's.
"""

import os
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import torch

FORM_VARIABLE = "PANNIER_GPU_FORM"
LEAST_CAPABILITY = (7, 5)
"""Turing: the kernels are compiled for it and for later ones in the tests."""


class GpuForm(NamedTuple):
    """Which form the operators take on a GPU, and why."""

    name: str
    """`triton`, `flashinfer` or `torch`: torch's operators put together, which gathers all keys and values anew for
    each call."""
    reason: str


def uses_triton(device: torch.device) -> bool:
    """Whether the operators are Triton's there, but for what FlashInfer does if it is named."""
    return device.type == "cuda" and gpu_form(device).name != "torch"


@cache
def gpu_form(device: torch.device) -> GpuForm:
    """The form in use on this device. Raises ValueError when the one that is named can't be."""
    return choose(os.environ.get(FORM_VARIABLE), _problems(device))


def choose(named: str | None, problems: Mapping[str, str | None]) -> GpuForm:
    """The named form, or Triton's, or torch's; `problems` has what is wrong with each, None if nothing is.

    Raises ValueError when the named one doesn't exist or can't be used.
    """
    if named:
        if named not in problems:
            raise ValueError(f"{FORM_VARIABLE} is {named!r}; known are {', '.join(problems)}")
        if problem := problems[named]:
            raise ValueError(f"{FORM_VARIABLE} is {named!r}, but {problem}")
        return GpuForm(named, f"{FORM_VARIABLE}={named}")
    if problem := problems["triton"]:
        return GpuForm("torch", problem)
    return GpuForm("triton", "the fastest that needs no other package")


def _problems(device: torch.device) -> dict[str, str | None]:
    triton = _triton_problem(device)
    flashinfer = (
        None if find_spec("flashinfer") else "flashinfer-python isn't installed: pip install pannier[flashinfer]"
    )
    return {"triton": triton, "flashinfer": triton or flashinfer, "torch": None}


def _triton_problem(device: torch.device) -> str | None:
    if torch.version.hip:
        return "the Triton kernels were never compiled for ROCm"
    if not find_spec("triton"):
        return "triton isn't installed; torch for CUDA brings it"
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        return f"{device} has compute capability {capability[0]}.{capability[1]}; the Triton kernels need 7.5"
    return None
