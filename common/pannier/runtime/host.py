"""This host as the kernel describes it, without torch: memory, cores, instruction sets."""

import os
import platform
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pannier.runtime.errors import ConfigError


@dataclass(frozen=True)
class Memory:
    """Bytes of one memory: all of it, and what can still be taken now."""

    total: int
    free: int


def host_memory() -> Memory:
    """The host's memory, or less where this process's control group has a limit."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    total, free = (int(fields[name].removesuffix("kB")) << 10 for name in ("MemTotal", "MemAvailable"))
    limit, used = _group_number("memory.max"), _group_number("memory.current")
    if limit is not None and used is not None:
        total, free = min(total, limit), min(free, max(0, limit - used))
    return Memory(total, free)


def host_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def keep_to_cores(cores: Collection[int]) -> None:
    """Run this process, and the threads that it will start, on these cores only. Raises `ConfigError`."""
    usable = os.sched_getaffinity(0)
    if not set(cores) <= usable:
        named, there = (", ".join(map(str, sorted(numbers))) for numbers in (cores, usable))
        raise ConfigError(f"cores are {named}; they must be among those that this process may use, {there}")
    os.sched_setaffinity(0, cores)


@cache
def cpu_name() -> str:
    """What the processor calls itself; its architecture where it doesn't say."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


@cache
def instruction_sets() -> frozenset[str]:
    """Names of the processor's extensions, as the kernel spells them (x86 `flags`, Arm `Features`)."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def _group_number(name: str) -> int | None:
    try:
        text = Path("/sys/fs/cgroup", name).read_text().strip()
    except OSError:  # the root group has no such file
        return None
    return int(text) if text.isdecimal() else None
