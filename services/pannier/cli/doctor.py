"""`pannier doctor`: is this machine, and a running stack, in order? If not: what is wrong, and what to do."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated

import typer

from pannier.cli.findings import (
    Finding,
    cache_folder,
    check_cache,
    check_compiler,
    check_devices,
    check_shared_memory,
    check_stack,
    worst,
)
from pannier.cli.options import DEFAULT_ENDPOINT, Endpoint, Insecure, Keys

MARKS = {"ok": "[green]ok[/]", "warning": "[yellow]look[/]", "error": "[red]wrong[/]"}


def doctor(
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    insecure: Insecure = False,
    keys: Keys = None,
    here: Annotated[bool, typer.Option("--here", help="Only this machine, no running stack.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check devices, element types, compiled operators, caches, and every edge of a running stack."""

    def look() -> Iterator[Finding]:
        yield from check_devices()
        yield from check_compiler()
        yield from check_shared_memory()
        yield from check_cache(cache_folder())
        if not here:
            yield from check_stack(endpoint, keys, insecure=insecure)

    found = list(look())
    if as_json:
        print(json.dumps({"command": "doctor", "findings": [asdict(finding) for finding in found]}))
    else:
        _print(found)
    raise typer.Exit(worst(found))


def _print(found: list[Finding]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False, show_header=False)
    for finding in found:
        advice = f"\n→ {finding.advice}" if finding.advice else ""
        table.add_row(MARKS[finding.level], escape(finding.what), escape(finding.said + advice))
    console.print(table)
