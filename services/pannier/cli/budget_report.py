"""What `pannier bench offline --kv-budget` says: every engine beside what was predicted, and where offloading pays."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from pannier.cli.overlap_run import Window
from pannier.cli.report import FILE_WIDTH, Report
from pannier.planner.measured import MeasuredClock, Prediction

OFFLOADED = "offloaded"
MS = 1e3


@dataclass
class Found:
    """Of one engine."""

    predicted: Prediction
    batch: int = 0
    windows: list[Window] = field(default_factory=list)


def report_of(case: str, found: Mapping[str, Found], clocks: Mapping[str, MeasuredClock]) -> Report:
    """Batch and speed of every engine beside what was predicted, and whether offloading pays beside each budget."""
    settings: dict[str, dict[str, object]] = {
        f"calibration of {name}": {
            f"{each.rows:g} rows of {each.tokens / each.rows:.0f} tokens": _times(each.parts)
            for each in (*clock.short, clock.long)
        }
        for name, clock in clocks.items()
    }
    report = Report("bench offline --kv-budget", settings=settings)
    for name, each in found.items():
        report.add(case, name, "batch", "sequences", [float(each.batch)])
        report.add(case, name, "predicted_batch", "sequences", [float(each.predicted.batch)])
        report.add(case, name, "decode_tokens_per_s", "tokens/s", [w.tokens / w.wall_s for w in each.windows])
        report.add(case, name, "predicted_decode_tokens_per_s", "tokens/s", [each.predicted.tokens_per_s])
        report.add(
            case, name, "time_between_tokens", "ms", [MS * w.wall_s * w.requests / w.tokens for w in each.windows]
        )
    settings["verdict"] = {name: _verdict(report, name) for name in found if name != OFFLOADED}
    return report


def _times(parts: tuple[float, ...]) -> str:
    return " + ".join(f"{MS * part:.1f}" for part in parts) + " ms"


def _verdict(report: Report, budget: str) -> str:
    value = {(row.engine, row.metric): row.value for row in report.rows}

    def times(metric: str) -> float:
        return value[OFFLOADED, metric] / value[budget, metric]

    measured, predicted = times("decode_tokens_per_s"), times("predicted_decode_tokens_per_s")
    word = "pays" if measured > 1 else "doesn't pay"
    return (
        f"offloading {word}: {measured:.2f} times the tokens/s (predicted {predicted:.2f}) with "
        f"{times('batch'):.3g} times the batch (predicted {times('predicted_batch'):.3g})"
    )


def print_budgets(report: Report) -> None:
    """A line for each engine, then the verdicts."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else FILE_WIDTH)
    table = Table(box=None, pad_edge=False)
    for column in ("engine", "at once", "predicted", "tokens/s", "predicted", "repeats"):
        table.add_column(column)
    rows = {(row.engine, row.metric): row for row in report.rows}
    for engine in dict.fromkeys(row.engine for row in report.rows):
        batch, tokens_per_s = (
            [f"{rows[engine, prefix + metric].value:.4g}" for prefix in ("", "predicted_")]
            for metric in ("batch", "decode_tokens_per_s")
        )
        repeats = " ".join(f"{value:.4g}" for value in rows[engine, "decode_tokens_per_s"].repeats)
        table.add_row(engine, *batch, *tokens_per_s, repeats)
    console.print(report.rows[0].case)
    console.print(table)
    for budget, verdict in report.settings["verdict"].items():
        console.print(f"beside {budget}, {verdict}")
