"""What `pannier doctor` looks at, one question a function; each says what is wrong and what to do about it."""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pannier.client import Client, ClientError, Unreachable

MAX_SKEW_S = 2.0
CACHE_BYTES = 64 << 20
"""What slices of a large model may take."""
ANSWER_S = 3.0


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    level: Literal["ok", "warning", "error"]
    what: str
    said: str
    advice: str = ""


def check_compiler(find: Callable[[str], str | None] = shutil.which) -> Iterator[Finding]:
    """Whether attention on CPUs is compiled, and could be."""
    from pannier.ops.native import cpu_isa

    isa, reason = cpu_isa()
    if isa is not None:
        yield Finding("ok", "compiled operators", f"{isa} ({reason})")
    elif find("g++") is None:
        advice = "install g++ and run scripts/build_kernels.py: attention on CPUs is several times as fast with them"
        yield Finding("error", "compiled operators", "none, and there is no C++ compiler", advice)
    else:
        yield Finding("error", "compiled operators", reason, "run scripts/build_kernels.py, which says what is wrong")


def check_devices(has_native_bf16: Callable[[Any], bool] | None = None) -> Iterator[Finding]:
    """What can compute here, and in which element types without converting."""
    import torch

    from pannier.runtime.machine import memory, native_dtypes
    from pannier.wire import Dtype

    for name in ("cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))):
        device = torch.device(name)
        native = native_dtypes(device)
        knows = Dtype.BFLOAT16 in native if has_native_bf16 is None else has_native_bf16(device)
        said = f"{memory(device).free >> 20} MiB free; natively {', '.join(each.name.lower() for each in native)}"
        if knows:
            yield Finding("ok", name, said)
        else:
            advice = "give --dtype float16 on a GPU, float32 on a CPU; pannier audit dtype says what conversions cost"
            yield Finding("warning", name, f"{said}; bfloat16 would be emulated", advice)


def check_cache(folder: Path, free: Callable[[Path], int] | None = None) -> Iterator[Finding]:
    """Whether what slicing finds can be kept for the next start."""
    there = next(each for each in (folder, *folder.parents) if each.exists())
    left = shutil.disk_usage(there).free if free is None else free(there)
    if left < CACHE_BYTES:
        advice = f"make room, or give workers another cache_dir; without it every start slices again ({there})"
        yield Finding("error", "cache", f"{left >> 20} MiB are free for {folder}", advice)
        return
    try:
        with tempfile.NamedTemporaryFile(dir=there):
            pass
    except OSError as error:
        yield Finding("error", "cache", f"{there} can't be written to: {error.strerror}", "give workers a cache_dir")
    else:
        yield Finding("ok", "cache", f"{left >> 20} MiB free for {folder}")


def check_shared_memory() -> Iterator[Finding]:
    """Whether workers on this host can share memory."""
    from pannier.net.shm import CannotShare, functions

    try:
        functions()
    except CannotShare as error:
        yield Finding("warning", "shared memory", str(error), "links within this host use sockets, which are slower")
    else:
        yield Finding("ok", "shared memory", "links within this host can use it")


def check_stack(
    endpoint: str, keys: Path | None, *, insecure: bool, clock: Callable[[], float] = time.time
) -> Iterator[Finding]:
    """Whether a gateway answers there, and what is wrong with the stack behind it."""
    with Client(endpoint, connect_timeout_s=ANSWER_S, insecure=insecure, keys=keys) as client:
        try:
            asked = clock()
            status = client.status(timeout_s=2 * ANSWER_S)
            answered = clock()
        except Unreachable as error:
            yield Finding("error", "gateway", str(error), _why_unreachable(endpoint, keys))
            return
        except ClientError as error:
            yield Finding("error", "gateway", str(error), "is it a Pannier gateway of this version?")
            return
        yield Finding("ok", "gateway", f"{endpoint} serves {status['model']}")
        yield from _check_clock(status, (asked + answered) / 2)
        yield from _check_workers(status)
        yield from _check_edges(client, status)


def _why_unreachable(endpoint: str, keys: Path | None) -> str:
    if keys is None:
        return (
            f"is a stack running there? The port is the gateway's client_endpoint ({endpoint} was asked), not its "
            "control_endpoint nor the HTTP front's; a gateway with keys needs --keys"
        )
    return "the gateway must have this client's public key, and this client the gateway's; pannier keys makes both"


def _check_clock(status: dict[str, Any], now: float) -> Iterator[Finding]:
    skew = status["time"] - now
    said = f"the gateway's clock is {skew:+.2f} s from this one"
    if abs(skew) > MAX_SKEW_S:
        yield Finding(
            "warning", "clock", said, "let chrony or ntpd set both: logs of several hosts can't be put in order"
        )
    else:
        yield Finding("ok", "clock", said)


def _check_workers(status: dict[str, Any]) -> Iterator[Finding]:
    for refused in status["refused_workers"]:
        yield Finding("error", refused["worker"], f"refused: {refused['reason']}", "give it what the others have")
    for process in status["processes"]:
        if process["standing"] == "ready":
            yield Finding("ok", process["name"], "ready")
        else:
            yield Finding(
                "warning", process["name"], f"is {process['standing']}", "its log says what it is doing or waits for"
            )
    if not status["ready"]:
        yield Finding("error", "stack", "is not ready", "start the workers that are missing")


def _check_edges(client: Client, status: dict[str, Any]) -> Iterator[Finding]:
    """One token goes over every link of one compute worker and one group; the status says what links there are."""
    links = {process["link"] for process in status["processes"] if process["role"] == "compute" and process["link"]}
    if not status["ready"]:
        return
    try:
        started = time.perf_counter()
        client.complete([0], max_tokens=1, temperature=0.0, timeout_s=ANSWER_S, deadline_s=ANSWER_S)
    except ClientError as error:
        yield Finding("error", "one token", str(error), "the logs of compute and attention workers say more")
    else:
        took_ms = 1e3 * (time.perf_counter() - started)
        yield Finding(
            "ok", "one token", f"{took_ms:.0f} ms through all processes, over {', '.join(sorted(links)) or '-'}"
        )


def worst(findings: Collection[Finding]) -> int:
    """Exit status: 0 if nothing is wrong, 1 if something is."""
    return int(any(finding.level == "error" for finding in findings))


def cache_folder() -> Path:
    """Where workers that weren't told otherwise keep slices."""
    from pannier.slicer import default_cache_dir

    return Path(os.environ.get("PANNIER_COMPUTE_CACHE_DIR") or default_cache_dir())
