"""Results in the long form of DESIGN 12, read back from files: what any measuring command printed with --json."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pannier.planner.catalogue import Catalogue
from pannier.planner.compare import Side
from pannier.runtime.errors import ConfigError


@dataclass(frozen=True)
class Result:
    """One file: figures by case and engine, and what it says of itself."""

    name: str
    instance: str | None
    figures: dict[tuple[str, str], dict[str, float]]
    source: str = ""
    note: str = ""
    settings: dict[str, Any] = field(default_factory=dict)

    def sides(self, usd_per_hour: float | None) -> Iterator[Side]:
        """Each engine on each case; a price that the result itself has wins."""
        for (case, engine), figures in self.figures.items():
            yield Side(self.name, engine, case, figures, figures.get("usd_per_hour", usd_per_hour))


def read_result(path: Path, instance: str | None = None) -> Result:
    """The object on a file's last line that is one, or that is the whole file. Raises `ConfigError`."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from error
    found = _object(text)
    try:
        rows = [(row["case"], row["engine"], row["metric"], float(row["value"])) for row in found["rows"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} is no result: it must be what a command printed with --json") from error
    figures: dict[tuple[str, str], dict[str, float]] = {}
    for case, engine, metric, value in rows:
        figures.setdefault((case, engine), {})[metric] = value
    where = instance or found.get("machine", {}).get("instance")
    return Result(
        where or path.stem, where, figures, found.get("source", ""), found.get("note", ""), found.get("settings", {})
    )


def price_of(result: Result, given: float | None, catalogue: Catalogue) -> float | None:
    """Dollars an hour: as given, or of the instance that the result is from."""
    if given is not None or result.instance is None:
        return given
    return catalogue.instance(result.instance).usd_per_hour


def pairs(first: list[Side], second: list[Side]) -> list[tuple[Side, Side]]:
    """The same engine on the same case; else the only engine of each, or the only case. Raises `ConfigError`."""
    for same in (lambda s: (s.case, s.engine), lambda s: s.engine, lambda s: s.case, lambda _: None):
        keys_a, keys_b = [same(side) for side in first], [same(side) for side in second]
        shared = [key for key in keys_a if key in keys_b]
        if shared and all(keys_a.count(key) == keys_b.count(key) == 1 for key in shared):
            return [(first[keys_a.index(key)], second[keys_b.index(key)]) for key in shared]
    known = "; ".join(f"{side.name}: {side.engine}, {side.case}" for side in (*first, *second))
    raise ConfigError(f"these results have no engine or case in common ({known}); choose with --engine or --case")


def _object(text: str) -> dict[str, Any]:
    for part in (text, *reversed(text.splitlines())):
        try:
            found = json.loads(part)
        except ValueError:
            continue
        if isinstance(found, dict):
            return found
    return {}
