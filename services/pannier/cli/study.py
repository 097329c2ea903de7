"""G5g against G6: the published measurements, and what of their ranking is the instances' and what the software's."""

from dataclasses import replace
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING

from pannier.cli import page
from pannier.cli.compare_command import comparison_report, print_comparison
from pannier.cli.compare_page import plots, write_comparison
from pannier.cli.numbers import shown
from pannier.cli.results import Result, price_of, read_result
from pannier.planner.catalogue import Catalogue, expectation
from pannier.planner.compare import Side

if TYPE_CHECKING:
    from rich.console import Console

INPUTS = ("g5g_jax", "g6_jax", "g5g_vllm", "g6_vllm")
CASE = "Gemma-4-E2B-it, 1 stream"
BESIDE = ("g5.2xlarge", "g6e.2xlarge")
"""Instances that articles mean or take for these: A10G and L40S."""


def run_study(console: "Console", catalogue: Catalogue, *, html: Path | None, as_json: bool) -> None:
    """Say it, write it."""
    results = inputs()
    found, beside = comparisons(catalogue, results), predictions(catalogue, results)
    notes = [*named(), *(f"{each.name}: {each.note} ({each.source})" for each in results)]
    print_comparison(console, found, notes)
    console.print("beside, predicted from the G6's vLLM by memory bandwidth, since one stream is held by it:")
    for side in beside:
        console.print(
            f"  {side.name} ({side.engine}): {shown(side.tokens_per_s)} tokens/s, ${shown(side.usd_per_mtok)}/Mtok"
        )
    if html is not None:
        more = [page.paragraph("Beside, predicted from the G6's vLLM by memory bandwidth:"), page.charts(plots(beside))]
        write_comparison(html, "G5g against G6", found, notes, more)
    if as_json:
        report = comparison_report("compare --study", found)
        for side in beside:
            assert side.tokens_per_s is not None
            report.add(side.case, f"{side.name} {side.engine}", "throughput", "tokens/s", [side.tokens_per_s])
        print(report.to_json())


def inputs() -> list[Result]:
    """The published measurements, which come with Pannier."""
    folder, found = files("pannier.planner") / "data" / "g5g_g6", []
    for name in INPUTS:
        with as_file(folder / f"{name}.json") as path:
            found.append(read_result(path))
    return found


def comparisons(catalogue: Catalogue, results: list[Result]) -> list[tuple[Side, Side]]:
    """The port on both; the same with no conversions left; another engine on both."""
    sides = []
    for result in results:
        price = price_of(result, None, catalogue)
        sides.append(next(side for side in result.sides(price) if side.case == CASE))
    port, vllm = (sides[0], sides[1]), (sides[2], sides[3])
    return [port, (port[0].without_conversions(), port[1].without_conversions()), vllm]


def predictions(catalogue: Catalogue, results: list[Result]) -> list[Side]:
    """One stream of vLLM on what else the names are taken for: the G6's throughput by the memory bandwidth."""
    base = next(side for side in results[3].sides(None) if side.case == CASE)
    measured, speed = catalogue.instance(base.name), base.tokens_per_s
    bandwidth = catalogue.accelerator(measured.accelerator).memory_gb_per_s
    assert speed is not None
    assert bandwidth is not None
    found = []
    for name in BESIDE:
        instance = catalogue.instance(name)
        device = catalogue.accelerator(instance.accelerator)
        assert device.memory_gb_per_s is not None
        predicted = speed * device.memory_gb_per_s / bandwidth
        figures = {"decode_tokens_per_s": predicted, "streams": 1.0}
        found.append(
            replace(
                base, name=name, engine=f"{device.name}, predicted", figures=figures, usd_per_hour=instance.usd_per_hour
            )
        )
    return found


def named() -> list[str]:
    """What the names stand for, put right."""
    return [said for family in ("g5g", "g6", "g5", "g6e") if (said := expectation(family))]
