"""What a device natively does, as far as element types go, and which of torch's compiled code it runs."""

import re
from dataclasses import dataclass
from typing import NamedTuple

import torch

from pannier.runtime.host import cpu_name
from pannier.runtime.machine import native_dtypes, read_bandwidth


@dataclass(frozen=True)
class Device:
    """One device, here or described.

    Attributes:
        name: what its maker calls it.
        kind: `cpu` or `cuda`.
        native: element types that it multiplies without converting first.
        bandwidth: bytes it reads from its memory in a second.
        capability: compute capability, as in `7.5`; empty for a CPU.
        archs: what this torch was compiled for; empty for a CPU, or a device elsewhere.
    """

    name: str
    kind: str
    native: tuple[str, ...]
    bandwidth: float
    capability: str = ""
    archs: tuple[str, ...] = ()

    @property
    def cubin(self) -> str:
        """What runs on it of `archs`; empty where there are none."""
        return chosen_code(self.capability, self.archs) if self.archs else ""

    @property
    def native_types(self) -> frozenset[torch.dtype]:
        """The same as torch's."""
        return frozenset(getattr(torch, name) for name in self.native)


def describe(device: torch.device) -> Device:
    """A device of this machine, whose memory is measured."""
    native = tuple(torch_name(dtype.name.lower()) for dtype in native_dtypes(device))
    if device.type == "cpu":
        return Device(cpu_name(), "cpu", native, read_bandwidth(device))
    major, minor = torch.cuda.get_device_capability(device)
    return Device(
        torch.cuda.get_device_name(device),
        "cuda",
        native,
        read_bandwidth(device),
        f"{major}.{minor}",
        tuple(torch.cuda.get_arch_list()),
    )


def torch_name(wire_name: str) -> str:
    """What torch calls an element type of the wire."""
    return "float8_e4m3fn" if wire_name == "float8_e4m3" else wire_name


def chosen_code(capability: str, archs: tuple[str, ...]) -> str:
    """The compiled code that a device runs: machine code of its own generation, at most as new as it is, else none.

    Machine code for 8.6 runs on 8.9, so a list without a device's own number may be right; across generations only
    intermediate code (`compute_`) runs, once it is compiled at the first start.
    """
    own = Code.of(capability.replace(".", ""))
    assert own is not None
    known = [(arch, Code.of(arch.partition("_")[2])) for arch in archs]
    machine = [(code, arch) for arch, code in known if arch.startswith("sm_") and code and code.runs_on(own)]
    if machine:
        return max(machine)[1]
    between = [(code, arch) for arch, code in known if arch.startswith("compute_") and code and code <= own]
    return f"{max(between)[1]}, compiled at start" if between else "none: this torch can't use it"


class Code(NamedTuple):
    """What a number such as `86` or `90a` says that code is for."""

    major: int
    minor: int
    only: str
    """`a`: this device alone; empty or `f`: newer ones of its generation too."""

    @classmethod
    def of(cls, number: str) -> "Code | None":
        """None for what is no such number."""
        matched = re.fullmatch(r"(\d+)(\d)([af]?)", number)
        return cls(int(matched[1]), int(matched[2]), matched[3]) if matched else None

    def runs_on(self, device: "Code") -> bool:
        """Whether machine code for this runs on a device."""
        if self.only == "a":
            return self[:2] == device[:2]
        return self.major == device.major and self.minor <= device.minor
