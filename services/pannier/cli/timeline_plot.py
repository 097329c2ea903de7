"""Lanes over time as a picture or as a trace: from what compute workers wrote to a file whose name says what it is."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from pannier.runtime.errors import ConfigError

COLOURS = {"compute": "#2f6db3", "attention": "#e08a1e", "transfer": "#d5d8dc"}
WIDTH, LABELS, ROW, GAP, TOP = 1200, 190, 18, 4, 30
"""Pixels: of the picture, of its labels, of a row and what lies between two, of the legend."""
US = 1e6


class Bar(NamedTuple):
    """What a lane or a device does, from `start` to `end` in seconds since the picture begins."""

    kind: str
    start: float
    end: float
    step: int
    call: int


@dataclass(frozen=True)
class Line:
    """One lane or device over time."""

    group: str
    name: str
    bars: list[Bar]


def lines(engine: str, folder: Path, start: float, end: float) -> list[Line]:
    """The lanes of each compute worker, its device, and the attention pool that they share, from `start` to `end`."""
    found, attention = [], []
    for file in sorted(folder.glob("*.json")):
        written = json.loads(file.read_text(encoding="utf-8"))
        spans = [dict(zip(written["fields"], span, strict=True)) for span in written["spans"]]
        spans = [span for span in spans if span["end"] > start and span["start"] < end]
        for lane in sorted({span["lane"] for span in spans}):
            bars = _bars((span for span in spans if span["lane"] == lane), start, end)
            found.append(Line(engine, f"{written['worker']} lane {lane}", bars))
        of_kind = {kind: _bars((s for s in spans if s["kind"] == kind), start, end) for kind in COLOURS}
        found.append(Line(engine, f"{written['worker']} device", of_kind["compute"]))
        attention += of_kind["attention"]
    return [*found, Line(engine, "attention", sorted(attention, key=lambda bar: bar.start))] if found else []


def check_plot(path: Path) -> None:
    """Raises `ConfigError` if there is no way to draw such a file."""
    if path.suffix not in WRITERS:
        raise ConfigError(f"--plot is {path}; it must end with {', '.join(WRITERS)}")
    if path.suffix == ".png" and find_spec("matplotlib") is None:
        raise ConfigError(f"--plot is {path}; a png needs matplotlib, which isn't installed: choose .svg")


def write_plot(path: Path, drawn: list[Line]) -> None:
    """Draw the lines into a file that `check_plot` has found possible."""
    WRITERS[path.suffix](path, drawn)


def _bars(spans: Iterable[dict[str, Any]], start: float, end: float) -> list[Bar]:
    return [
        Bar(span["kind"], max(span["start"], start) - start, min(span["end"], end) - start, span["step"], span["call"])
        for span in spans
    ]


def _write_svg(path: Path, drawn: list[Line]) -> None:
    length = max((bar.end for line in drawn for bar in line.bars), default=1.0)
    scale = (WIDTH - LABELS) / length
    parts, y = [_legend(length)], TOP
    for before, line in pairwise([None, *drawn]):
        assert line is not None
        y += ROW if before is None or before.group != line.group else 0
        parts.append(f'<text x="4" y="{y + ROW - 5}">{escape(f"{line.group}: {line.name}")}</text>')
        for bar in line.bars:
            place = f'x="{LABELS + bar.start * scale:.2f}" y="{y}" width="{(bar.end - bar.start) * scale:.2f}"'
            title = f"{bar.kind}, step {bar.step}, call {bar.call}, {(bar.end - bar.start) * 1e3:.3f} ms"
            parts.append(f'<rect {place} height="{ROW}" fill="{COLOURS[bar.kind]}"><title>{title}</title></rect>')
        y += ROW + GAP
    body = "\n".join(parts)
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y + GAP}" '
        f'font-family="sans-serif" font-size="11">\n<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n',
        encoding="utf-8",
    )


def _legend(length: float) -> str:
    entries = [
        f'<rect x="{LABELS + 90 * i}" y="8" width="12" height="12" fill="{colour}"/>'
        f'<text x="{LABELS + 90 * i + 16}" y="18">{kind}</text>'
        for i, (kind, colour) in enumerate(COLOURS.items())
    ]
    return "".join([*entries, f'<text x="{WIDTH - 120}" y="18">{length * 1e3:.1f} ms in all</text>'])


def _write_trace(path: Path, drawn: list[Line]) -> None:
    """In the format that Perfetto and chrome://tracing read."""
    groups = list(dict.fromkeys(line.group for line in drawn))
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": number, "args": {"name": group}}
        for number, group in enumerate(groups)
    ]
    for thread, line in enumerate(drawn):
        place = {"pid": groups.index(line.group), "tid": thread}
        events.append({"ph": "M", "name": "thread_name", **place, "args": {"name": line.name}})
        events += [
            {
                "ph": "X",
                "name": bar.kind,
                "ts": bar.start * US,
                "dur": (bar.end - bar.start) * US,
                **place,
                "args": {"step": bar.step, "call": bar.call},
            }
            for bar in line.bars
        ]
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")


def _write_png(path: Path, drawn: list[Line]) -> None:
    figure = import_module("matplotlib.figure").Figure(figsize=(14, 0.5 + 0.3 * len(drawn)), layout="constrained")
    axes = figure.subplots()
    for place, line in enumerate(drawn):
        bars = [(bar.start * 1e3, (bar.end - bar.start) * 1e3) for bar in line.bars]
        axes.broken_barh(bars, (place - 0.4, 0.8), facecolors=[COLOURS[bar.kind] for bar in line.bars])
    axes.set_yticks(range(len(drawn)), [f"{line.group}: {line.name}" for line in drawn])
    axes.invert_yaxis()
    axes.set_xlabel("ms (" + ", ".join(f"{kind} {colour}" for kind, colour in COLOURS.items()) + ")")
    figure.savefig(path)


WRITERS = {".svg": _write_svg, ".json": _write_trace, ".png": _write_png}
