"""`pannier status`: what runs, as a table or as JSON."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pannier.cli.options import DEFAULT_ENDPOINT, Endpoint, Insecure, Keys

if TYPE_CHECKING:
    from rich.table import Table

WIDE = 200
"""Columns of a table that goes into a file."""
TIMES = ("compute", "exposed_attention", "exposed_transfer")


def status(
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    insecure: Insecure = False,
    keys: Keys = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show every process of a running stack."""
    from pannier.client import Client

    with Client(endpoint, insecure=insecure, keys=keys) as client:
        found = client.status()
    if as_json:
        print(json.dumps(found))
    else:
        _print(found)


def _print(found: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDE
    for part in view(found):
        console.print(part, soft_wrap=isinstance(part, str))


def view(found: dict[str, Any]) -> "list[str | Table]":
    """What the command shows, from top to bottom."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in COLUMNS:
        table.add_column(column)
    for process in found["processes"]:
        table.add_row(*(show(process) for show in COLUMNS.values()))
    requests = found["requests"]
    state = "ready" if found["ready"] else "not ready"
    head = f"{found['model']}: {state}, {requests['running']} running, {requests['waiting']} waiting"
    waits = _waits(found["lanes"])
    return [head, table, *_dtypes(found["processes"]), *([] if waits is None else [waits])]


def _dtypes(processes: list[dict[str, Any]]) -> list[str]:
    """The element type of each role and why, once for all workers that say the same."""
    who: dict[str, list[str]] = {}
    for process in processes:
        for role, choice in process.get("dtypes", {}).items():
            who.setdefault(f"{role} {choice['dtype']}: {choice['reason']}", []).append(process["name"])
    return [f"{said} ({', '.join(names)})" for said, names in who.items()]


def _waits(lanes: list[dict[str, Any]]) -> str | None:
    """What of the time in which there was something to do no lane could go on, since the lanes began."""
    sums = {name: sum(lane["seconds"].get(f"{name}_s", 0.0) for lane in lanes) for name in TIMES}
    total = sum(sums.values())
    if not total:
        return None
    compute, attention, transfer = (f"{100 * sums[name] / total:.0f} %" for name in TIMES)
    return f"compute works {compute} of the time, waits for attention {attention}, for transfer {transfer}"


def _plain(name: str) -> Any:
    def show(process: dict[str, Any]) -> str:
        value = process.get(name)
        return "-" if value is None or value == "" else str(value)

    return show


def _heads(process: dict[str, Any]) -> str:
    """Every distinct range of KV heads that the worker holds."""
    return (
        ", ".join(f"{start}-{stop - 1}" if stop > start else "none" for start, stop in process.get("heads", ())) or "-"
    )


def _stage(process: dict[str, Any]) -> str:
    stage = process.get("stage")
    return "-" if stage is None else f"{stage['number'] + 1} of {stage['count']}"


def _blocks(process: dict[str, Any]) -> str:
    blocks = process.get("blocks")
    return "/".join(str(blocks[name]) for name in ("used", "cached", "free", "total")) if blocks else "-"


COLUMNS = {
    "role": _plain("role"),
    "name": _plain("name"),
    "pid": _plain("pid"),
    "state": _plain("standing"),
    "device": _plain("device"),
    "model": _plain("model"),
    "dtype": _plain("dtype"),
    "KV heads": _heads,
    "blocks used/cached/free/total": _blocks,
    "stage": _stage,
    "lanes": _plain("lanes"),
    "link": _plain("link"),
    "event loop": _plain("event_loop"),
}
