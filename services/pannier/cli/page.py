"""A page of text, tables and charts in one file that needs nothing else."""

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

STYLE = (
    "body{font:15px/1.45 sans-serif;margin:2em auto;max-width:1340px;padding:0 1em;color:#222}"
    "table{border-collapse:collapse;margin:1em 0}td,th{padding:2px 12px 2px 0;text-align:right}"
    "td:first-child,th:first-child{text-align:left}tr:nth-child(even){background:#f4f6f8}"
    ".charts{display:flex;flex-wrap:wrap;gap:12px}svg{border:1px solid #ddd}.verdict{font-size:1.15em;font-weight:bold}"
)


def paragraph(text: str, kind: str = "") -> str:
    """One paragraph of plain text."""
    attribute = f' class="{kind}"' if kind else ""
    return f"<p{attribute}>{escape(text)}</p>"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells of plain text."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def charts(drawn: Iterable[str]) -> str:
    """Charts side by side where there is room."""
    return f'<div class="charts">{"".join(drawn)}</div>'


def write(path: Path, title: str, parts: Iterable[str]) -> None:
    """Write the page."""
    path.write_text(
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head><body><h1>{escape(title)}</h1>\n" + "\n".join(parts) + "\n</body></html>\n",
        encoding="utf-8",
    )
