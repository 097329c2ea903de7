"""`pannier gateway`, `compute` and `attention`: one process of a stack, as systemd or `pannier serve` runs it.

Imports are inside, in two steps: the logs and the supervisor's pipe come before torch, which takes seconds.
"""

import functools
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from pannier.cli.supervised import follow_supervisor

if TYPE_CHECKING:
    from pannier.attention.core import AttentionCore
    from pannier.runtime.config import ComputeConfig, RoleConfig
    from pannier.wire.messages import AttentionFacts

ConfigFile = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="TOML file with the settings.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="One setting; wins over file and environment.")
]
Supervised = Annotated[bool, typer.Option("--supervised", hidden=True)]
C = TypeVar("C", bound="RoleConfig")


def gateway(config: ConfigFile = None, setting: Settings = None, supervised: Supervised = False) -> None:
    """Run the gateway: requests, text, scheduling."""
    from pannier.runtime.config import GatewayConfig

    loaded = _enter(GatewayConfig, config, setting or (), supervised)
    from pannier.gateway.service import run

    raise typer.Exit(run(loaded))


def compute(config: ConfigFile = None, setting: Settings = None, supervised: Supervised = False) -> None:
    """Run a compute worker: weights, slices, sampling."""
    from pannier.runtime.config import ComputeConfig

    loaded = _enter(ComputeConfig, config, setting or (), supervised)
    from pannier.compute.service import run

    raise typer.Exit(run(loaded, functools.partial(_local_attention, loaded) if loaded.monolithic else None))


def attention(config: ConfigFile = None, setting: Settings = None, supervised: Supervised = False) -> None:
    """Run an attention worker: KV blocks and the attention operator."""
    from pannier.runtime.config import AttentionConfig

    loaded = _enter(AttentionConfig, config, setting or (), supervised)
    from pannier.attention.service import run

    raise typer.Exit(run(loaded))


def http(config: ConfigFile = None, setting: Settings = None, supervised: Supervised = False) -> None:
    """Run an HTTP front: OpenAI's API, as a client of the gateway. Any number of them may run."""
    from pannier.runtime.config import HttpConfig

    loaded = _enter(HttpConfig, config, setting or (), supervised)
    from pannier.http.service import run

    raise typer.Exit(run(loaded))


def _enter(kind: type[C], file: Path | None, settings: Iterable[str], supervised: bool) -> C:
    """Configuration and logs of this process. A supervisor's file is complete: the environment is not asked again."""
    from pannier.runtime import log
    from pannier.runtime.config import load

    if supervised:
        follow_supervisor()
    config = load(kind, file, _settings(settings), {} if supervised else os.environ)
    log.configure(kind.role, getattr(config, "name", kind.role), debug="PANNIER_DEBUG" in os.environ)
    return config


def _settings(settings: Iterable[str]) -> dict[str, object]:
    pairs = [setting.partition("=") for setting in settings]
    for name, equals, _ in pairs:
        if not equals:
            raise typer.BadParameter(f"{name!r} is not NAME=VALUE", param_hint="--set")
    return {name: value for name, _, value in pairs}


def _local_attention(config: "ComputeConfig") -> "tuple[AttentionCore, AttentionFacts]":
    """Attention for the compute worker's own process; only the command line knows both services."""
    from pannier.attention.core import AttentionCore
    from pannier.attention.pace import Pace
    from pannier.attention.past import DrawnCache
    from pannier.attention.service import attention_facts
    from pannier.ops.kv_cache import KVCache
    from pannier.runtime.machine import open_device

    device, pace = open_device(config.device), Pace.of(config)
    facts = attention_facts(device, config.attention_memory, endpoint="", pace=pace)
    cache = DrawnCache if config.emulate_past else KVCache
    stretch = None if pace is None else pace.wait
    return AttentionCore(device, cache, stretch, strict=config.dtype_strict), facts
