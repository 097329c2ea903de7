"""Accelerators, and the instances that have them: what is known of their rates, memory, network and price.

The figures stand in data/accelerators.json and data/instances.json beside their sources; a file of the user's may
replace any of them or add to them. None: not established, so nothing may be computed with it. A catalogue is only
what is known beforehand: what a profile measured on a device says wins over it (`Catalogue.measured`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import msgspec

from pannier.runtime.errors import ConfigError

GB, TERA, MIB, MBPS = 1e9, 1e12, 1 << 20, 1e6 / 8
"""Units of the files, in bytes, operations and bytes per second."""
RATES = {"bfloat16": "bf16_tflops", "float16": "fp16_tflops", "float32": "fp32_tflops"}
"""By dtype the field that says how fast it is multiplied."""

EXPECTED = {
    "g5g": "G5g is a T4G (Turing: no bfloat16) on a Graviton2, not an A10G: that is G5",
    "g5": "G5 is an A10G with less than half an A10's 16-bit rate; the T4G on a Graviton2 is G5g",
    "g6": "G6 is an L4, with less memory bandwidth than a G5's A10G; the L40S is G6e",
    "g6e": "G6e is an L40S; the L4 is G6",
    "gr6": "Gr6 is a G6 (L4) with twice the host memory",
    "g6f": "G6f is a part of an L4",
}
"""By family what its name makes people expect, put right."""

Positive = Annotated[float, msgspec.Meta(gt=0)]


class Accelerator(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One kind of device, in the units of its file; dense rates."""

    name: str
    architecture: str = ""
    compute_capability: str = ""
    memory_gib: Positive | None = None
    memory_gb_per_s: Positive | None = None
    measured_read_gb_per_s: Positive | None = None
    fp16_tflops: Positive | None = None
    bf16_tflops: Positive | None = None
    tf32_tflops: Positive | None = None
    fp8_tflops: Positive | None = None
    int8_tops: Positive | None = None
    fp32_tflops: Positive | None = None
    native_bf16: bool | None = None
    native_fp8: bool | None = None
    pcie_generation: int | None = None
    power_w: Positive | None = None
    note: str = ""
    source: str = ""

    def flops(self, dtype: str) -> float | None:
        """Advertised FLOP/s of matrix products in this dtype; None: none is established, or there is none."""
        tera = getattr(self, RATES[dtype])
        return None if tera is None else float(tera) * TERA

    @property
    def native(self) -> tuple[str, ...]:
        """The dtypes of `RATES` that it multiplies without converting first."""
        return tuple(dtype for dtype in RATES if dtype != "bfloat16" or self.native_bf16)


class Instance(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One machine that can be rented, in the units of its file; `accelerators` 0 is a part of one."""

    name: str
    accelerator: str
    accelerators: int = 1
    reported_mib: Positive | None = None
    """Memory of one accelerator as the provider reports it; the device itself often has less to give."""
    vcpu: int | None = None
    cpu: str = ""
    ram_mib: Positive | None = None
    network_mbps: Positive | None = None
    """Baseline in each direction, not the burst."""
    efa_interfaces: int | None = None
    nvme_gb: float | None = None
    usd_per_hour: Positive | None = None

    @property
    def family(self) -> str:
        """What stands before the size."""
        return self.name.split(".")[0]


class FlowLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Gbit/s of one connection between two instances, which may be less than the network between them."""

    source: str = ""
    flow_gbps: Positive = 5
    flow_gbps_in_placement_group: Positive = 10
    flow_gbps_with_ena_express: Positive = 25


class _Accelerators(msgspec.Struct, forbid_unknown_fields=True):
    accelerators: list[Accelerator]
    note: str = ""
    unit: str = ""


class _Instances(msgspec.Struct, forbid_unknown_fields=True):
    instances: list[Instance]
    source: str
    price: str
    region: str
    date: str
    note: str
    network: FlowLimits


class _Overrides(msgspec.Struct, forbid_unknown_fields=True):
    """A user's file: any fields of rows by their name, and where and when its prices are from."""

    accelerators: list[dict[str, Any]] = []
    instances: list[dict[str, Any]] = []
    region: str | None = None
    date: str | None = None


@dataclass(frozen=True)
class Catalogue:
    """All that is known, by name."""

    accelerators: Mapping[str, Accelerator]
    instances: Mapping[str, Instance]
    limits: FlowLimits
    prices: str
    """What the prices are, where and when."""

    def instance(self, name: str) -> Instance:
        """Raises `ConfigError` if there is none."""
        if name not in self.instances:
            near = [each for each in self.instances if each.startswith(name.split(".")[0])]
            there = ", ".join(near or sorted({each.family for each in self.instances.values()}))
            raise ConfigError(f"the catalogue has no instance {name!r}; it has {there}")
        return self.instances[name]

    def accelerator(self, name: str) -> Accelerator:
        """Raises `ConfigError` if there is none."""
        if name not in self.accelerators:
            raise ConfigError(f"the catalogue has no accelerator {name!r}; it has {', '.join(self.accelerators)}")
        return self.accelerators[name]

    def overridden(self, path: Path) -> "Catalogue":
        """With a file's rows, which say only what differs or is new. Raises `ConfigError`."""
        try:
            given = msgspec.json.decode(path.read_bytes(), type=_Overrides)
            accelerators = _merged(self.accelerators, given.accelerators, Accelerator)
            instances = _merged(self.instances, given.instances, Instance)
        except OSError as error:
            raise ConfigError(f"{path} can't be read: {error.strerror}") from error
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise ConfigError(f"{path}: {error}") from error
        where = ", ".join(filter(None, (given.region, given.date))) or "undated"
        prices = f"{self.prices}; {path.name}: {where}"
        return replace(self, accelerators=accelerators, instances=instances, prices=prices)


def load_catalogue(path: Path | None = None) -> Catalogue:
    """What comes with Pannier, and what a file says instead. Raises `ConfigError`."""
    folder = files("pannier.planner") / "data"
    devices = msgspec.json.decode((folder / "accelerators.json").read_bytes(), type=_Accelerators)
    rented = msgspec.json.decode((folder / "instances.json").read_bytes(), type=_Instances)
    catalogue = Catalogue(
        {each.name: each for each in devices.accelerators},
        {each.name: each for each in rented.instances},
        rented.network,
        f"{rented.price}, {rented.region}, {rented.date}",
    )
    return catalogue if path is None else catalogue.overridden(path)


def expectation(instance: str) -> str | None:
    """What people who know an instance by its name often take it for, put right."""
    return EXPECTED.get(instance.split(".")[0])


def _merged(known: Mapping[str, Any], rows: list[dict[str, Any]], kind: type[Any]) -> dict[str, Any]:
    found = dict(known)
    for row in rows:
        old = msgspec.to_builtins(found[row["name"]]) if row.get("name") in found else {}
        new = msgspec.convert(old | row, type=kind)
        found[new.name] = new
    return found
