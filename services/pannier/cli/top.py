"""`pannier top`: a live picture of pools, lanes and blocks in a terminal."""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pannier.cli.lapse import LaneLapse, Status, bottleneck, lapses
from pannier.cli.options import DEFAULT_ENDPOINT, Endpoint, Insecure, Keys

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from pannier.client import Client

BAR = 24
"""Characters."""
STYLES = {"compute": "green", "attention": "yellow", "transfer": "red", "used": "blue", "cached": "cyan"}


def top(
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    insecure: Insecure = False,
    keys: Keys = None,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
    count: Annotated[int | None, typer.Option(min=1, help="Leave after so many pictures.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for each look.")] = False,
) -> None:
    """Watch a running stack: what each lane does, what fills the blocks, and what holds things back."""
    from rich.console import Console
    from rich.live import Live

    from pannier.client import Client

    with Client(endpoint, insecure=insecure, keys=keys) as client:
        seen = islice(_looks(client, interval), count)
        if as_json:
            for status, found in seen:
                print(json.dumps(as_dict(status, found)), flush=True)
            return
        with Live(console=Console(highlight=False), auto_refresh=False) as live:
            for status, found in seen:
                live.update(picture(status, found), refresh=True)


def _looks(client: "Client", interval: float) -> Iterator[tuple[dict[str, Any], list[LaneLapse]]]:
    """The status, and what has happened since the look before."""
    before, at = client.status(), time.monotonic()
    while True:
        time.sleep(interval)
        after, now = client.status(), time.monotonic()
        yield after, lapses(before, after, now - at)
        before, at = after, now


def as_dict(status: Status, found: Sequence[LaneLapse]) -> dict[str, Any]:
    """The same as the picture, for programs."""
    workers = [process for process in status["processes"] if process["role"] == "attention"]
    return {
        **{name: status[name] for name in ("model", "ready", "requests")},
        "bottleneck": bottleneck(status, found),
        "lanes": [asdict(lane) for lane in found],
        "attention": [{name: worker.get(name) for name in ("name", "group", "heads", "blocks")} for worker in workers],
    }


def picture(status: Status, found: Sequence[LaneLapse]) -> "Group":
    """What one look shows."""
    from rich.console import Group
    from rich.text import Text

    requests = status["requests"]
    state = "ready" if status["ready"] else "not ready"
    head = f"{status['model']}: {state}, {requests['running']} running, {requests['waiting']} waiting"
    return Group(Text(head, style="bold"), Text(bottleneck(status, found)), "", _lanes(found), "", _attention(status))


def _lanes(found: Sequence[LaneLapse]) -> "Table":
    table = _table("compute", "lane", "steps/s", f"{'':{BAR}}", "computes", "attention", "transfer")
    for lane in found:
        shares = {name: getattr(lane, name) for name in ("compute", "attention", "transfer")}
        percents = [f"{100 * share:.0f} %" for share in shares.values()]
        table.add_row(lane.worker, str(lane.lane), f"{lane.steps_per_s:.1f}", bar(shares), *percents)
    return table


def _attention(status: Status) -> "Table":
    table = _table("attention", "group", "KV heads", f"{'':{BAR}}", "used", "cached", "blocks")
    for process in status["processes"]:
        blocks = process.get("blocks")
        if process["role"] != "attention":
            continue
        heads = ", ".join(f"{start}-{stop - 1}" for start, stop in process["heads"]) or "-"
        if blocks is None:
            table.add_row(process["name"], "-", heads, process["standing"])
            continue
        shares = {name: blocks[name] / blocks["total"] for name in ("used", "cached")}
        numbers = [str(blocks[name]) for name in ("used", "cached", "total")]
        table.add_row(process["name"], str(process["group"]), heads, bar(shares), *numbers)
    return table


def _table(*columns: str) -> "Table":
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column)
    return table


def bar(shares: dict[str, float]) -> "Text":
    """Shares of a whole, one behind the other; what is left is empty."""
    from rich.text import Text

    made, total = Text(), max(1.0, sum(shares.values()))
    for name, share in shares.items():
        made.append("█" * round(BAR * share / total), style=STYLES[name])
    return made[:BAR] + Text("·" * max(0, BAR - len(made)), style="dim")
