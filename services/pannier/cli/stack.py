"""What `pannier serve` starts: from its options to one configuration per process."""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from pannier.runtime.config import AttentionConfig, ComputeConfig, GatewayConfig, HttpConfig, load
from pannier.runtime.errors import ConfigError
from pannier.runtime.host import host_cores, host_memory

WorkerConfig: TypeAlias = ComputeConfig | AttentionConfig
EVERY_ROLE = ("insecure", "keys", "encrypt", "otlp_endpoint")
MAX_WORKERS = 64
KV_BYTES = 2 << 30
"""For the KV blocks of all attention workers on CPUs together, or a quarter of what is free if that is less: they write
all of it as they start, and the host's memory also serves others."""


@dataclass(frozen=True)
class ServeOptions:
    """The options of `pannier serve` as they were given; None: not given."""

    model: str
    served_model_name: str | None = None
    compute: str = "cpu"
    stages: int = 1
    pin: bool = False
    """Each worker on cores of its own."""
    attention: str | None = None
    monolithic: bool = False
    link: str | None = None
    flows: int | None = None
    lanes: int | None = None
    dtype: str | None = None
    dtype_strict: bool = False
    kv_dtype: str | None = None
    heads_split: str | None = None
    attention_memory: str | None = None
    max_batch_tokens: int | None = None
    max_sequences: int | None = None
    max_waiting: int | None = None
    policy: str | None = None
    prefix_cache: bool | None = None
    max_model_len: str | int | None = None
    block_size: int | None = None
    endpoint: str | None = None
    """Where clients come in; None: a socket in the stack's own folder, for one client."""
    http_port: int | None = None
    """None: no HTTP front."""
    http_host: str | None = None
    api_keys: tuple[str, ...] = ()
    insecure: bool = False
    keys: Path | None = None
    encrypt: str | None = None
    otlp_endpoint: str | None = None
    emulate_compute: str | None = None
    emulate_attention: str | None = None
    emulate_rate: str | None = None
    """One for all attention workers, or one for each, separated by commas."""
    emulate_delay: float | None = None
    emulate_bandwidth: float | None = None
    emulate_past: bool | None = None
    """Prompts count as stored, in caches of random numbers."""
    timelines: Path | None = None
    """A folder for what the lanes of each compute worker do."""


@dataclass(frozen=True)
class Stack:
    """One configuration per process."""

    gateway: GatewayConfig
    workers: tuple[WorkerConfig, ...]
    http: HttpConfig | None = None


def plan(options: ServeOptions, folder: Path) -> Stack:
    """The stack, talking over sockets in `folder`. Raises `ConfigError` naming what is wrong with an option."""
    compute = _compute_devices(options)
    attention = _attention_devices(options)
    shared = {
        "gateway": f"ipc://{folder}/control",
        **_named(options, EVERY_ROLE),
        "threads": max(1, host_cores() // len([*compute, *attention])),
        "dtype_strict": options.dtype_strict,
        "emulate_attention": options.emulate_attention,
        "emulate_past": options.emulate_past,
    }
    cores = _cores(options, len([*compute, *attention]))
    holders = compute if options.monolithic else attention
    memory = _memory_per_worker(options, holders)
    rates, network = _rates(options, len(holders)), _network(options)
    workers: list[WorkerConfig] = [
        *(_compute_worker(options, folder, shared, memory, number, device) for number, device in enumerate(compute)),
        *(
            _attention_worker(folder, shared | network | {"emulate_rate": rate}, memory, number, device)
            for number, (device, rate) in enumerate(zip(attention, rates, strict=False))
        ),
    ]
    pinned = [worker.model_copy(update={"cores": own}) for worker, own in zip(workers, cores, strict=True)]
    gateway = _gateway(options, folder, len(compute), len(holders))
    return Stack(gateway, tuple(pinned), _http(options, gateway))


def _http(options: ServeOptions, gateway: GatewayConfig) -> HttpConfig | None:
    if options.http_port is None:
        return None
    flags = {
        "gateway": gateway.client_endpoint,
        "host": options.http_host,
        "port": options.http_port,
        "api_keys": options.api_keys or None,
        **_named(options, EVERY_ROLE),
    }
    return load(HttpConfig, flags=flags)


def _cores(options: ServeOptions, num_workers: int) -> list[tuple[int, ...] | None]:
    """Equal parts of the cores for all workers; the gateway runs wherever there is time."""
    if not options.pin:
        return [None] * num_workers
    usable = sorted(os.sched_getaffinity(0))
    each = len(usable) // num_workers
    if not each:
        raise ConfigError(f"--pin gives each of {num_workers} workers a core of its own, and there are {len(usable)}")
    return [tuple(usable[number * each : (number + 1) * each]) for number in range(num_workers)]


def _gateway(options: ServeOptions, folder: Path, compute_workers: int, attention_workers: int) -> GatewayConfig:
    flags = {
        "control_endpoint": f"ipc://{folder}/control",
        "data_endpoint": f"ipc://{folder}/data",
        "client_endpoint": options.endpoint or f"ipc://{folder}/clients",
        "compute_workers": compute_workers,
        "attention_workers": attention_workers,
    }
    same = (
        "model", "served_model_name", "max_batch_tokens", "max_sequences", "max_waiting", "policy", "prefix_cache",
        "max_model_len", "block_size", "heads_split", "kv_dtype", "emulate_past", *EVERY_ROLE,
    )  # fmt: skip
    return load(GatewayConfig, flags=flags | _named(options, same))


def _compute_worker(
    options: ServeOptions,
    folder: Path,
    shared: Mapping[str, object],
    memory: str | int | None,
    number: int,
    device: str,
) -> ComputeConfig:
    flags = {
        **shared,
        # What nothing is computed with would only wait for another thread.
        "threads": 1 if options.emulate_compute is not None else shared["threads"],
        "name": f"compute-{number}",
        "device": device,
        "stage": number % options.stages,
        "listen": f"ipc://{folder}/compute-{number}",
        "attention_memory": memory if options.monolithic else None,
        # A second lane hides transfer; without any it only makes every batch half as large.
        "lanes": 1 if options.monolithic and options.lanes is None else options.lanes,
        "timeline": options.timelines and options.timelines / f"compute-{number}.json",
        "emulate_rate": options.emulate_rate if options.monolithic else None,
    }
    same = ("model", "dtype", "max_model_len", "stages", "monolithic", "link", "flows", "emulate_compute")
    return load(ComputeConfig, flags=flags | _named(options, same))


def _attention_worker(
    folder: Path, shared: Mapping[str, object], memory: str | int | None, number: int, device: str
) -> AttentionConfig:
    flags = {
        **shared,
        "name": f"attention-{number}",
        "device": device,
        "memory": memory,
        "listen": f"ipc://{folder}/attention-{number}",
    }
    return load(AttentionConfig, flags=flags)


def _named(options: ServeOptions, names: Iterable[str]) -> dict[str, object]:
    return {name: getattr(options, name) for name in names}


def _compute_devices(options: ServeOptions) -> list[str]:
    """One for every stage of every replica, the stages of a replica in order."""
    devices, stages = _devices("--compute", options.compute), options.stages
    if not 1 <= stages <= MAX_WORKERS:
        raise ConfigError(f"--stages is {stages}; it must be 1 to {MAX_WORKERS}")
    if len(devices) == 1:
        return devices * stages
    if len(devices) % stages:
        raise ConfigError(f"--compute {options.compute} is {len(devices)} devices, no multiple of --stages {stages}")
    return devices


def _attention_devices(options: ServeOptions) -> list[str]:
    given = options.attention
    if options.monolithic:
        if "," in options.compute:
            raise ConfigError(f"--compute {options.compute} has several devices; --monolithic runs on one")
        if given is not None:
            raise ConfigError(f"--attention {given} and --monolithic exclude each other: choose where attention runs")
        return []
    if given is None:
        return ["cpu"]
    if given.isdecimal():
        if not 1 <= int(given) <= MAX_WORKERS:
            raise ConfigError(f"--attention is {given}; it must be 1 to {MAX_WORKERS}, or devices such as cpu,cuda:0")
        return ["cpu"] * int(given)
    return _devices("--attention", given)


def _devices(option: str, given: str) -> list[str]:
    devices = given.split(",")
    if not all(re.fullmatch(r"cpu|cuda:\d+", device) for device in devices):
        raise ConfigError(f"{option} is {given!r}; it must be devices such as cpu or cuda:0,cuda:1")
    return devices


def _rates(options: ServeOptions, holders: int) -> list[str | None]:
    """`--emulate-rate` of each worker that attends."""
    given = options.emulate_rate
    rates: list[str | None] = [None] if given is None else [*given.split(",")]
    if len(rates) not in (1, holders):
        raise ConfigError(f"--emulate-rate is {given}; it must be one factor, or one for each of {holders} workers")
    return rates * (holders // len(rates))


def _network(options: ServeOptions) -> dict[str, object]:
    """What attention workers emulate of the network between them and compute workers."""
    named = _named(options, ("emulate_delay", "emulate_bandwidth"))
    given = [f"--{name.replace('_', '-')} {value:g}" for name, value in named.items() if value is not None]
    if given and options.monolithic:
        raise ConfigError(f"{' and '.join(given)}: --monolithic has no links that could be slower")
    return named


def _memory_per_worker(options: ServeOptions, holders: list[str]) -> str | int | None:
    """What was asked for; else for CPUs, which share the host's memory, an equal part; a GPU knows its own."""
    if options.attention_memory is not None or "cpu" not in holders:
        return options.attention_memory
    return min(KV_BYTES, host_memory().free // 4) // len(holders)
