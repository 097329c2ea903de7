"""What a measuring command found, in long form: rows of single values, and ratios between engines.

Every measuring command prints the same object as its last line with `--json`, so that any program reads any of them.
"""

import json
import os
import platform
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from statistics import median
from typing import Any

PACKAGES = ("pannier", "torch", "transformers", "pyzmq")


@dataclass(frozen=True)
class Row:
    """One measured value: the median of its repeats, which are kept."""

    case: str
    engine: str
    metric: str
    value: float
    unit: str
    repeats: tuple[float, ...]


@dataclass(frozen=True)
class Ratio:
    """How many times as much one engine has of a metric as another, measured side by side."""

    case: str
    metric: str
    of: str
    to: str
    value: float


@dataclass
class Report:
    """Rows and ratios of one run of a command."""

    command: str
    rows: list[Row] = field(default_factory=list)

    def add(self, case: str, engine: str, metric: str, unit: str, repeats: list[float]) -> None:
        """Add a metric's repeats."""
        self.rows.append(Row(case, engine, metric, median(repeats), unit, tuple(repeats)))

    def ratios(self, to: str) -> list[Ratio]:
        """Every other engine against the engine `to`, where both have the same metric."""
        base = {(row.case, row.metric): row.value for row in self.rows if row.engine == to}
        return [
            Ratio(row.case, row.metric, row.engine, to, row.value / base[row.case, row.metric])
            for row in self.rows
            if row.engine != to and (row.case, row.metric) in base
        ]

    def to_json(self, to: str) -> str:
        """The object that programs read, on one line."""
        found: dict[str, Any] = {
            "command": self.command,
            "machine": {"cpu": _cpu(), "cores": len(os.sched_getaffinity(0)), "system": platform.platform()},
            "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
            "rows": [asdict(row) for row in self.rows],
            "ratios": [asdict(ratio) for ratio in self.ratios(to)],
        }
        return json.dumps(found)

    def print(self, to: str) -> None:
        """A table for people."""
        from rich.console import Console
        from rich.table import Table

        table = Table(box=None, pad_edge=False)
        for column in ("case", "engine", "metric", "median", "", "repeats", f"of {to}"):
            table.add_column(column)
        ratios = {(ratio.case, ratio.metric, ratio.of): ratio.value for ratio in self.ratios(to)}
        for row in self.rows:
            ratio = ratios.get((row.case, row.metric, row.engine))
            repeats = " ".join(f"{value:.4g}" for value in row.repeats)
            share = "" if ratio is None else f"{ratio:.2f}x"
            table.add_row(row.case, row.engine, row.metric, f"{row.value:.4g}", row.unit, repeats, share)
        Console(highlight=False).print(table)


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()
