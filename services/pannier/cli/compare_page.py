"""Comparisons as a page: tables, verdicts and plots."""

from collections.abc import Sequence
from pathlib import Path

from pannier.cli import page
from pannier.cli.charts import bar_chart
from pannier.cli.numbers import shown, times
from pannier.planner.compare import Side, lines, verdict


def write_comparison(
    path: Path, title: str, found: Sequence[tuple[Side, Side]], notes: Sequence[str], more: Sequence[str] = ()
) -> None:
    """Write the page; `more` are further parts, as they are."""
    parts = [page.paragraph(note) for note in notes]
    for first, second in found:
        parts.append(page.paragraph(verdict(first, second), "verdict"))
        rows = [
            (line.what, shown(line.first), shown(line.second), times(line.ratio), line.unit)
            for line in lines(first, second)
        ]
        columns = ("", f"{first.name}: {first.engine}", f"{second.name}: {second.engine}", "ratio", "")
        parts.append(page.table(columns, rows))
    sides = [side for pair in found for side in pair]
    page.write(path, title, [*parts, page.charts(plots(sides)), *more])


def plots(sides: Sequence[Side]) -> list[str]:
    """Throughput, with what conversions take of it, and cost, of all sides that have them."""
    speeds, costs = {}, {}
    for side in dict.fromkeys(f"{side.name} {side.engine}" for side in sides):
        each = next(s for s in sides if f"{s.name} {s.engine}" == side)
        if each.tokens_per_s is not None:
            best = each.without_conversions().tokens_per_s or each.tokens_per_s
            speeds[side] = {"as found": each.tokens_per_s, "lost to conversions, at most": best - each.tokens_per_s}
        if each.usd_per_mtok is not None:
            costs[side] = {"$ per million tokens": each.usd_per_mtok}
    return [bar_chart("Throughput", "tokens/s", speeds), bar_chart("Cost", "$ per million tokens", costs)]
