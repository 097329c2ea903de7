"""What a pool of instances brings to a plan: devices with the rates that are achieved rather than advertised."""

from dataclasses import dataclass
from typing import NamedTuple

from pannier.planner.catalogue import GB, MBPS, MIB, RATES, Accelerator, Catalogue, Instance
from pannier.planner.profile import Profile
from pannier.runtime.errors import ConfigError


class Shares(NamedTuple):
    """Of the advertised rates, what is achieved.

    The defaults bring step times into the ranges of the figures 12 and 14 of the Lamina paper (arXiv 2405.01814v2);
    they were read off by eye, so they are good for orders of magnitude. A measured rate is taken as it is.
    """

    weights: float = 0.6
    """Of the memory bandwidth, when weights are read."""
    flops: float = 0.45
    """Of the arithmetic."""
    attention: float = 0.8
    """Of the memory bandwidth, when K and V are read."""
    memory: float = 0.9
    """Of the memory, for weights, K and V."""


ACHIEVED = Shares()
IDEAL = Shares(1.0, 1.0, 1.0, 0.9)


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator in a pool; rates a second."""

    name: str
    flops: float | None
    """None: not known, so it is not taken for a bound."""
    weight_bandwidth: float
    kv_bandwidth: float
    memory_bytes: float
    """For weights, K and V."""
    network: float
    """Bytes each way: its part of what its instance has."""
    usd_per_hour: float
    """Its part of its instance's price."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of instance as a plan sees it."""

    name: str
    device: Device
    devices: int
    """Of one instance."""
    native: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def usd_per_hour(self) -> float:
        """Of one instance."""
        return self.devices * self.device.usd_per_hour


def choose_dtype(kinds: list[tuple[str, tuple[str, ...]]], wanted: str) -> tuple[str, str]:
    """The dtype of weights, K, V and wire, and why: bfloat16 unless a device would have to convert it (DESIGN 9)."""
    if wanted != "auto":
        return wanted, "asked for"
    without = [name for name, native in kinds if "bfloat16" not in native]
    if without:
        return "float16", f"{', '.join(dict.fromkeys(without))} would have to convert bfloat16"
    return "bfloat16", "native to all"


def kind_of(
    catalogue: Catalogue, name: str, dtype: str, shares: Shares = Shares(), profiles: tuple[Profile, ...] = ()
) -> Kind:
    """An instance of the catalogue, with what was measured of its accelerator. Raises `ConfigError` naming a gap."""
    instance = catalogue.instance(name)
    accelerator = catalogue.accelerator(instance.accelerator)
    measured = next((each for each in profiles if each.accelerator == accelerator.name), None)
    if not instance.accelerators:
        raise ConfigError(f"{name} has a part of an {accelerator.name}; which share of its bandwidth isn't established")
    if dtype not in RATES:
        raise ConfigError(f"dtype is {dtype!r}; it must be auto, {', '.join(RATES)}")
    device = Device(
        name=accelerator.name,
        flops=_flops(accelerator, dtype, shares, measured),
        weight_bandwidth=_bandwidth(accelerator, shares.weights, measured),
        kv_bandwidth=_bandwidth(accelerator, shares.attention, measured, is_attention=True),
        memory_bytes=shares.memory * _memory(accelerator, instance, measured),
        network=_known(instance.network_mbps, name, "network") * MBPS / instance.accelerators,
        usd_per_hour=_known(instance.usd_per_hour, name, "price") / instance.accelerators,
    )
    notes = (f"{accelerator.name}: measured on it, {measured.source}",) if measured else ()
    return Kind(name=name, device=device, devices=instance.accelerators, native=accelerator.native, notes=notes)


def card_kind(catalogue: Catalogue, name: str, usd_per_hour: float, network: float, dtype: str, shares: Shares) -> Kind:
    """A single card with a network of its own. Raises `ConfigError` naming a gap."""
    accelerator = catalogue.accelerator(name)
    device = Device(
        name=name,
        flops=_flops(accelerator, dtype, shares, None),
        weight_bandwidth=_bandwidth(accelerator, shares.weights, None),
        kv_bandwidth=_bandwidth(accelerator, shares.attention, None),
        memory_bytes=shares.memory * _known(accelerator.memory_gib, name, "memory") * 1024 * MIB,
        network=network,
        usd_per_hour=usd_per_hour,
    )
    return Kind(name=name, device=device, devices=1, native=accelerator.native)


def _flops(accelerator: Accelerator, dtype: str, shares: Shares, measured: Profile | None) -> float | None:
    if measured is not None and (rate := measured.flops(dtype)) is not None:
        return rate
    advertised = accelerator.flops(dtype)
    return None if advertised is None else shares.flops * advertised


def _bandwidth(
    accelerator: Accelerator, share: float, measured: Profile | None, *, is_attention: bool = False
) -> float:
    if measured is not None:
        return measured.attention_bytes_per_s if is_attention else measured.read_bytes_per_s
    advertised = _known(accelerator.memory_gb_per_s, accelerator.name, "memory bandwidth")
    achievable = min(share * advertised, accelerator.measured_read_gb_per_s or advertised)
    return achievable * GB


def _memory(accelerator: Accelerator, instance: Instance, measured: Profile | None) -> float:
    """What the device reports, by its catalogue row or its profile; the provider may report less or more."""
    if measured is not None:
        return measured.memory_bytes
    device = None if accelerator.memory_gib is None else accelerator.memory_gib * 1024
    found = [mib for mib in (device, instance.reported_mib) if mib is not None]
    return min(found) * MIB if found else _known(None, instance.name, "memory")


def _known(value: float | None, name: str, what: str) -> float:
    if value is None:
        raise ConfigError(f"{name}: its {what} isn't established; say it in a file (--catalogue)")
    return value
