#!/usr/bin/env python
"""The Lamina paper's figures beside ours: costs, bytes, batches, network, throughput, and its first version's.

Nothing is measured; it takes a second. `--trace FILE` (may be repeated) also recomputes the means of table 4 from the
published files. Prices of cards are data/purchase.json unless `--prices` names another file. Exit 1 when a figure that
is to be exact isn't.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from pannier.planner import read_trace
from pannier.planner.catalogue import load_catalogue
from pannier.planner.check import Check, Outcome
from pannier.planner.first_version import FirstVersion
from pannier.planner.paper import Paper
from pannier.planner.purchase import Prices, read_prices


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, action="append", default=[], help="a file of table 4; may be repeated")
    parser.add_argument("--prices", type=Path, help="what cards cost, to rent or to buy")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    options = parser.parse_args()
    prices = read_prices(options.prices)
    sections = {title: list(checks) for title, checks in all_checks(prices, options.trace)}
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 200)
    for title, checks in sections.items():
        show(console, title, checks)
    if options.json:
        print(
            json.dumps({"command": "bench paper", "rows": [row(check) for each in sections.values() for check in each]})
        )
    return 1 if any(each.outcome is Outcome.NOT_REPRODUCED for each in sections["the paper"]) else 0


def all_checks(prices: Prices, traces: list[Path]) -> Iterator[tuple[str, Iterator[Check]]]:
    paper = Paper.read()
    yield "the paper", paper.all()
    yield "its traces", (check for path in traces for check in paper.trace(read_trace(path)))
    yield "what was told of its first version", FirstVersion.of(paper, load_catalogue(), prices.hourly()).all()


def show(console: Console, title: str, checks: list[Check]) -> None:
    table = Table(title, "published", "ours", "", "why", box=None, pad_edge=False)
    for each in checks:
        table.add_row(each.what, each.published, each.ours, each.outcome.value, each.why)
    if checks:
        console.print(table)
        console.print()


def row(check: Check) -> dict[str, str]:
    return {
        "case": check.what,
        "published": check.published,
        "ours": check.ours,
        "outcome": check.outcome.value,
        "why": check.why,
    }


if __name__ == "__main__":
    sys.exit(main())
