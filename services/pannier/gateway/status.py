"""The whole stack as plain data, for `pannier status` and for whoever waits until it is ready."""

import asyncio
import os
import re
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from pannier.gateway.engine import Engine
from pannier.gateway.entries import AttentionEntry, ComputeEntry, Standing
from pannier.gateway.fleet import Fleet
from pannier.runtime.dtype_policy import Choice
from pannier.wire import messages as m

if TYPE_CHECKING:
    from pannier.gateway.service import GatewayService


def status(service: "GatewayService") -> dict[str, Any]:
    """Every process with what it runs, and where requests and blocks stand."""
    fleet, engine = service.fleet, service.engine
    return {
        "time": time.time(),
        "ready": fleet.is_complete() and not service.draining,
        "model": engine.admission.model if engine is not None else fleet.config.model,
        "max_model_len": engine.admission.max_model_len if engine is not None else None,
        "vocab_size": engine.admission.vocab_size if engine is not None else None,
        "requests": _requests(service),
        "groups": _groups(engine),
        "accounting_errors": engine.accounting_errors if engine is not None else 0,
        "preemptions": engine.shortage.num_preemptions if engine is not None else 0,
        "lanes": _lanes(fleet, engine),
        "refused_workers": [{"worker": name, "reason": reason} for name, reason in service.registry.refused],
        "processes": [
            _gateway(service),
            *(_compute(fleet, fleet.compute[name]) for name in in_order(fleet.compute)),
            *(_attention(fleet, fleet.attention[name], engine) for name in in_order(fleet.attention)),
        ],
    }


def in_order(names: Iterable[str]) -> list[str]:
    """Names with their numbers as numbers: which worker came first says nothing."""
    return sorted(
        names, key=lambda name: [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]
    )


def _requests(service: "GatewayService") -> dict[str, int]:
    engine = service.engine
    return {
        "reading": len(service.intake),
        "running": engine.scheduler.num_running if engine is not None else 0,
        "waiting": engine.scheduler.num_waiting if engine is not None else 0,
    }


def _groups(engine: Engine | None) -> dict[str, dict[str, int]]:
    pools = engine.scheduler.pools if engine is not None else {}
    return {
        str(group): {"used": pool.used, "cached": pool.cached, "free": pool.free, "total": pool.total}
        for group, pool in pools.items()
    }


def _lanes(fleet: Fleet, engine: Engine | None) -> list[dict[str, Any]]:
    if engine is None:
        return []
    return [
        {
            "lane": lane - session.first_lane,
            "worker": session.names[-1],
            "steps": engine.steps_by_lane[lane],
            "seconds": engine.seconds_by_lane.get(lane, {}),
            "last_step": _times(engine.last_times.get(lane)),
        }
        for session in fleet.sessions()
        for lane in session.lanes
    ]


def _times(times: m.StepTimes | None) -> dict[str, float] | None:
    return None if times is None else {name: getattr(times, name) for name in times.__struct_fields__}


def _gateway(service: "GatewayService") -> dict[str, Any]:
    return {
        "role": "gateway",
        "name": "gateway",
        "pid": os.getpid(),
        "event_loop": type(asyncio.get_running_loop()).__module__,
        "standing": "draining" if service.draining else "ready",
        "endpoints": {
            "clients": service.clients.endpoint,
            "control": service.control.endpoint,
            "data": service.data.endpoint,
        },
        "encrypt": _encrypt(service),
        "stale_frames": service.stale_frames,
        "refused_frames": service.control.refused_frames + service.data.refused_frames + service.clients.refused_frames,
        "refused_handshakes": service.refused_handshakes,
    }


def _encrypt(service: "GatewayService") -> str:
    config = service.config
    return "all" if config.encrypts_links else "control" if config.used_keys else "none"


def _worker(hello: m.Hello, standing: Standing, counters: dict[str, float]) -> dict[str, Any]:
    return {
        "name": hello.name,
        "pid": hello.pid,
        "host": hello.host,
        "event_loop": hello.event_loop,
        "standing": str(standing),
        "counters": counters,
    }


def _compute(fleet: Fleet, entry: ComputeEntry) -> dict[str, Any]:
    facts = entry.facts
    return {
        "role": "compute",
        **_worker(entry.hello, entry.standing, entry.counters),
        "device": facts.device,
        "model": facts.model,
        "dtype": facts.dtype,
        "wire_dtype": (facts.wire_dtype if fleet.dtypes is None else fleet.dtypes.wire.dtype).name.lower(),
        "dtypes": {choice.role: _choice(choice) for choice in facts.dtypes} | _shared_dtypes(fleet, "wire"),
        "lanes": facts.lanes,
        "calls": len(facts.calls),
        "weight_bytes": facts.weight_bytes,
        "stage": None if facts.stage is None else _stage(facts.stage),
        "session": None if entry.session is None else entry.session.number,
        "link": entry.detail,
    }


def _shared_dtypes(fleet: Fleet, *roles: str) -> dict[str, dict[str, str]]:
    """Element types that were chosen for all groups, once they are."""
    return {} if fleet.dtypes is None else {role: _choice(getattr(fleet.dtypes, role)) for role in roles}


def _choice(choice: Choice | m.DtypeChoice) -> dict[str, str]:
    return {"dtype": choice.dtype.name.lower(), "reason": choice.reason}


def _stage(stage: m.StageFacts) -> dict[str, int]:
    return {
        "number": stage.number,
        "count": stage.count,
        "first_call": stage.calls.start,
        "last_call": stage.calls.stop - 1,
    }


def _attention(fleet: Fleet, entry: AttentionEntry, engine: Engine | None) -> dict[str, Any]:
    facts, assign = entry.facts, entry.assign
    return {
        "role": "attention",
        **_worker(entry.hello, entry.standing, entry.counters),
        "device": facts.device,
        "model": fleet.config.model,
        "memory_bytes": facts.memory_bytes,
        "bandwidth": facts.bandwidth,
        "dtype": assign.kv_dtype.name.lower() if assign is not None else None,
        "dtypes": _shared_dtypes(fleet, "kv", "wire"),
        "group": assign.group if assign is not None else None,
        "heads": sorted({(h.start, h.stop) for h in assign.heads}) if assign is not None else [],
        "blocks": _groups(engine).get(str(assign.group)) if assign is not None else None,
        "block_size": fleet.config.block_size,
    }
