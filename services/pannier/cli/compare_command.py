"""`pannier compare`: two results side by side, and a study that does that with what others have published."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pannier.cli.numbers import shown, times
from pannier.cli.report import FILE_WIDTH, Report
from pannier.runtime.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from pannier.planner.compare import Side


def compare(
    first: Annotated[Path | None, typer.Argument(metavar="A.json", help="What a command printed with --json.")] = None,
    second: Annotated[Path | None, typer.Argument(metavar="B.json", help="Another one.")] = None,
    study: Annotated[bool, typer.Option("--study", help="G5g against G6, as published, instead of two files.")] = False,
    instance_a: Annotated[str | None, typer.Option(help="Where A was measured, if it doesn't say.")] = None,
    instance_b: Annotated[str | None, typer.Option(help="Where B was measured, if it doesn't say.")] = None,
    usd_a: Annotated[float | None, typer.Option(help="Dollars an hour of A, if no instance says.")] = None,
    usd_b: Annotated[float | None, typer.Option(help="Dollars an hour of B, if no instance says.")] = None,
    engine: Annotated[str | None, typer.Option(help="Only this engine of each.")] = None,
    case: Annotated[str | None, typer.Option(help="Only this case of each.")] = None,
    catalogue: Annotated[Path | None, typer.Option(help="A file whose rows replace or add to the catalogue's.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with plots.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")] = False,
) -> None:
    """Compare throughput, latency, cost per token and conversions of two results, measured or planned."""
    from rich.console import Console

    from pannier.cli.compare_page import write_comparison
    from pannier.cli.results import pairs, price_of, read_result
    from pannier.cli.study import run_study
    from pannier.planner.catalogue import expectation, load_catalogue

    console = Console(highlight=False, markup=False, soft_wrap=True, width=None if sys.stdout.isatty() else FILE_WIDTH)
    known = load_catalogue(catalogue)
    if study:
        run_study(console, known, html=html, as_json=as_json)
        return
    if first is None or second is None:
        raise ConfigError("give two files, or --study")
    results = [read_result(path, where) for path, where in ((first, instance_a), (second, instance_b))]
    sides = [
        [side for side in result.sides(price_of(result, usd, known)) if _wanted(side, engine, case)]
        for result, usd in zip(results, (usd_a, usd_b), strict=True)
    ]
    if not all(sides):
        raise ConfigError("one of the results has no such engine or case")
    found = pairs(*sides)
    notes = [note for result in results if (note := expectation(result.name))]
    print_comparison(console, found, notes)
    if html is not None:
        write_comparison(html, "Pannier comparison", found, notes)
    if as_json:
        print(comparison_report("compare", found).to_json())


def print_comparison(console: "Console", found: "list[tuple[Side, Side]]", notes: list[str]) -> None:
    """A table and a verdict of each pair."""
    from rich.table import Table

    from pannier.planner.compare import lines, verdict

    for note in notes:
        console.print(note)
    for first, second in found:
        console.print(f"{title(first)} / {title(second)}")
        table = Table("", first.name, second.name, "ratio", "", box=None, pad_edge=False)
        for line in lines(first, second):
            table.add_row(line.what, shown(line.first), shown(line.second), times(line.ratio), line.unit)
        console.print(table)
        console.print(verdict(first, second))


def comparison_report(command: str, found: "list[tuple[Side, Side]]") -> Report:
    """Both sides' figures as rows, with the verdicts."""
    from pannier.planner.compare import lines, verdict

    report = Report(command)
    for number, (first, second) in enumerate(found, 1):
        for line in lines(first, second):
            for side, value in ((first, line.first), (second, line.second)):
                if value is not None:
                    report.add(side.case, f"{side.name} {side.engine}", line.what, line.unit, [value])
        report.settings[f"verdict {number}"] = {f"{first.name} / {second.name}": verdict(first, second)}
    return report


def title(side: "Side") -> str:
    """What a side is."""
    return f"{side.name}, {side.engine}, {side.case}"


def _wanted(side: "Side", engine: str | None, case: str | None) -> bool:
    return engine in (None, side.engine) and case in (None, side.case)
