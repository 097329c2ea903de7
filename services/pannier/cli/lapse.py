"""What has happened between two looks at a stack's status, and what that says of its bottleneck."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Status = Mapping[str, Any]
IDLE_SHARE = 0.02


@dataclass(frozen=True)
class LaneLapse:
    """Of one lane: steps per second, and shares of the time between the looks. What is left it had nothing to do."""

    worker: str
    lane: int
    steps_per_s: float
    compute: float
    attention: float
    """In which no lane of its worker could go on, for want of attention's answer."""
    transfer: float


def lapses(before: Status, after: Status, seconds: float) -> list[LaneLapse]:
    """Of every lane that is there in both."""
    old = {(lane["worker"], lane["lane"]): lane for lane in before["lanes"]}
    return [
        _lapse(old[lane["worker"], lane["lane"]], lane, seconds)
        for lane in after["lanes"]
        if (lane["worker"], lane["lane"]) in old
    ]


def _lapse(old: Mapping[str, Any], new: Mapping[str, Any], seconds: float) -> LaneLapse:
    def share(name: str) -> float:
        worked_s: float = new["seconds"].get(name, 0.0) - old["seconds"].get(name, 0.0)
        return max(0.0, worked_s) / seconds

    return LaneLapse(
        worker=new["worker"],
        lane=new["lane"],
        steps_per_s=max(0, new["steps"] - old["steps"]) / seconds,
        compute=share("compute_s"),
        attention=share("exposed_attention_s"),
        transfer=share("exposed_transfer_s"),
    )


def bottleneck(status: Status, found: Sequence[LaneLapse]) -> str:
    """One sentence."""
    if not status["ready"]:
        return "Not all workers are there yet."
    parts = {name: sum(getattr(lane, name) for lane in found) for name in ("compute", "attention", "transfer")}
    total = sum(parts.values())
    if total < IDLE_SHARE:
        return "Nothing to do."
    groups = status["groups"].values()
    if status["requests"]["waiting"] and any(group["free"] == group["cached"] == 0 for group in groups):
        return "KV blocks are short: requests wait for memory of attention workers."
    shares = {name: f"{100 * part / total:.0f} %" for name, part in parts.items()}
    if parts["transfer"] > parts["compute"]:
        return f"Links hold it back: transfer is exposed {shares['transfer']} of the time."
    if parts["attention"] > parts["compute"]:
        return f"Attention holds it back: it is exposed {shares['attention']} of the time."
    return (
        f"Compute works {shares['compute']} of the time; exposed are attention {shares['attention']}, "
        f"transfer {shares['transfer']}."
    )
