"""What a measuring command found, in long form: rows of single values, and ratios between engines.

Every measuring command prints the same object as its last line with `--json`, so that any program reads any of them.
"""

import json
import os
import platform
import sys
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

PACKAGES = ("pannier", "torch", "transformers", "pyzmq")
FILE_WIDTH = 160
"""Columns of a table that no terminal shows."""


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
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    """How engines were set, where that was decided for the measurement."""

    def add(self, case: str, engine: str, metric: str, unit: str, repeats: list[float]) -> None:
        """Add a metric's repeats."""
        self.rows.append(Row(case, engine, metric, median(repeats), unit, tuple(repeats)))

    def ratios(self, *to: str) -> list[Ratio]:
        """Every engine against each other engine in `to`, where both have a metric and that one isn't 0."""
        return [
            Ratio(row.case, row.metric, row.engine, base.engine, row.value / base.value)
            for base in self.rows
            if base.engine in to and base.value
            for row in self.rows
            if row.engine != base.engine and (row.case, row.metric) == (base.case, base.metric)
        ]

    def to_json(self, *to: str) -> str:
        """The object that programs read, on one line."""
        found: dict[str, Any] = {
            "command": self.command,
            "machine": {"cpu": cpu_name(), "cores": len(os.sched_getaffinity(0)), "system": platform.platform()},
            "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
            "rows": [asdict(row) for row in self.rows],
            "ratios": [asdict(ratio) for ratio in self.ratios(*to)],
            "settings": self.settings,
        }
        return json.dumps(found)

    def print(self, *to: str) -> None:
        """A table for people of each case, and how engines were set."""
        from rich.console import Console

        width = None if sys.stdout.isatty() else FILE_WIDTH
        console = Console(highlight=False, markup=False, soft_wrap=True, width=width)
        for case in dict.fromkeys(row.case for row in self.rows):
            console.print(case)
            console.print(self._table(case, to))
        for engine, settings in self.settings.items():
            if settings:
                console.print(f"{engine}: " + ", ".join(f"{name} {value}" for name, value in settings.items()))

    def _table(self, case: str, to: tuple[str, ...]) -> "Table":
        from rich.table import Table

        table = Table(box=None, pad_edge=False)
        for column in ("engine", "metric", "median", "", "repeats", *(f"of {base}" for base in to)):
            table.add_column(column, overflow="fold")
        ratios = {
            (each.metric, each.of, each.to): f"{each.value:.2f}x" for each in self.ratios(*to) if each.case == case
        }
        for row in self.rows:
            if row.case == case:
                repeats = " ".join(f"{value:.4g}" for value in row.repeats)
                shares = [ratios.get((row.metric, row.engine, base), "") for base in to]
                table.add_row(row.engine, row.metric, f"{row.value:.4g}", row.unit, repeats, *shares)
        return table


def cpu_name() -> str:
    """The processor as it calls itself."""
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()
