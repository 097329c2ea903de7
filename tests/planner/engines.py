"""Small plans for the tests: round numbers, so that every figure can be checked by hand."""

from dataclasses import replace

from pannier.planner.devices import Device, Kind
from pannier.planner.mix import Mix
from pannier.planner.offloaded import Offloaded, Wire
from pannier.planner.sizes import ModelSizes

MODEL = ModelSizes.dense("round", weights_bytes=2e9, layers=10, width=1024, queries_per_kv=4)
"""K and V of a token: 2 x 2 B x 1024 x 10 / 4 = 10,240 bytes; q, k, v: 30,720; the output: 20,480."""


def device(**changes: float) -> Device:
    """One GB/s of everything, one GB of memory beside what the weights take."""
    plain = Device(
        name="plain",
        flops=1e12,
        weight_bandwidth=1e9,
        kv_bandwidth=1e9,
        memory_bytes=3e9,
        network=1e9,
        usd_per_hour=1.0,
    )
    return replace(plain, **changes)  # type: ignore[arg-type]  # all of them numbers


def kind(**changes: float) -> Kind:
    devices = int(changes.pop("devices", 1))
    return Kind(name="plain.large", device=device(**changes), devices=devices, native=("bfloat16", "float16"))


def offloaded(**changes: object) -> Offloaded:
    """One compute and two attention devices, prompts elsewhere, a context of 1,000 tokens, no round trips."""
    plain = Offloaded(
        model=MODEL,
        mix=Mix.unbiased("even", 900, 200),
        compute=kind(),
        attention=kind(),
        compute_devices=1,
        attention_devices=2,
        wire=Wire(round_trip_s=0.0),
        has_prefill=False,
    )
    return replace(plain, **changes)  # type: ignore[arg-type]  # any field
