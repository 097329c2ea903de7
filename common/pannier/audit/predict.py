"""An audit of a model on a device that isn't here: traced, not run, with times computed from a catalogue's rates."""

from typing import Protocol

import torch
from transformers import PretrainedConfig

from pannier.audit.audit import Audit
from pannier.audit.calls import name_of
from pannier.audit.device import Device
from pannier.audit.drive import Workload
from pannier.audit.findings import findings_of
from pannier.audit.header import Dtypes, budget_of, emulation
from pannier.audit.static import trace
from pannier.audit.target import Target, predicted

GIGA, TERA = 1e9, 1e12
FLOATS = ("float32", "bfloat16", "float16")


class Accelerator(Protocol):
    """What has to be known of a device: a row of the planner's catalogue."""

    @property
    def name(self) -> str:
        """What its maker calls it."""

    @property
    def compute_capability(self) -> str:
        """As in `7.5`."""

    @property
    def memory_gb_per_s(self) -> float | None:
        """Advertised."""

    @property
    def measured_read_gb_per_s(self) -> float | None:
        """Where somebody has measured it."""

    @property
    def native(self) -> tuple[str, ...]:
        """Element types that it multiplies without converting them first."""

    def flops(self, dtype: str) -> float | None:
        """Operations a second."""


def audit_elsewhere(
    config: PretrainedConfig,
    dtype: torch.dtype,
    accelerator: Accelerator,
    work: Workload = Workload(),
    *,
    name: str = "",
    instance: str = "",
) -> Audit:
    """What to expect of a model with weights of `dtype` there.

    Raises:
        CannotTrace: its code can't be traced.
        ValueError: the device's memory bandwidth isn't known.
    """
    bandwidth = accelerator.measured_read_gb_per_s or accelerator.memory_gb_per_s
    if bandwidth is None:
        raise ValueError(f"the memory bandwidth of {accelerator.name} isn't known")
    where = f"{accelerator.name} ({instance}), predicted" if instance else f"{accelerator.name}, predicted"
    device = Device(where, "cuda", accelerator.native, bandwidth * GIGA, accelerator.compute_capability)
    flops = {each: rate for each in FLOATS if (rate := accelerator.flops(each)) is not None}
    recording = predicted(trace(config, dtype), Target(device, flops), work)
    own, found = name_of(dtype), findings_of(recording, device)
    return Audit(
        model=name or config.model_type,
        device=device,
        recording=recording,
        findings=found.findings,
        fixes=found.fixes,
        dtypes=Dtypes(own, own, own, own, own, own),
        attention="left out",
        fallbacks=tuple(emulation(device, own)),
        budget=budget_of(recording, device),
        checks=(
            "times are from bytes, arithmetic and the device's rates, without launches, attention and Python; "
            "what is emulated is taken to be widened in memory, the worst case",
        ),
    )
