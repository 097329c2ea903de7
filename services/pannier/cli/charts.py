"""Charts as SVG text, to be put into a page as they are: lines, points and bars on two axes."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

COLOURS = ("#2f6db3", "#e08a1e", "#3a8f5c", "#b3446c", "#6b6b6b", "#8a6fc0")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 400, 72, 16, 70, 46
"""Pixels: of the chart, and of what lies around its plot."""
MAX_TICKS = 6


@dataclass(frozen=True)
class Series:
    """Points of one colour, joined by a line unless they are to stand alone; `labels` show when one is pointed at."""

    name: str
    points: Sequence[tuple[float, float]]
    labels: Sequence[str] = ()
    is_line: bool = True


@dataclass(frozen=True)
class Axis:
    """From values to pixels."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool

    @classmethod
    def over(cls, values: Iterable[float], start: float, end: float, *, is_log: bool) -> "Axis":
        """An axis that begins at 0, or of powers of ten, and has room for all the values."""
        known = [value for value in values if value > 0 or not is_log] or [1.0]
        if is_log:
            return cls(10 ** floor(log10(min(known))), 10 ** ceil(log10(max(known) * 1.001)), start, end, is_log)
        return cls(0.0, max(*known, 1e-12) * 1.05, start, end, is_log)

    def at(self, value: float) -> float:
        """The pixel of a value."""
        scale: Callable[[float], float] = log10 if self.is_log else float
        share = (scale(value) - scale(self.low)) / (scale(self.high) - scale(self.low))
        return self.start + share * (self.end - self.start)

    @property
    def ticks(self) -> list[float]:
        """Round values, few of them."""
        if self.is_log:
            powers = range(round(log10(self.low)), round(log10(self.high)) + 1)
            return [10.0**power for power in powers][:: ceil(len(powers) / MAX_TICKS)]
        step = 10 ** floor(log10(self.high))
        step = next(step * part for part in (0.1, 0.2, 0.5, 1, 2) if self.high / (step * part) <= MAX_TICKS)
        return [step * number for number in range(int(self.high / step) + 1)]


def line_chart(
    title: str, x_name: str, y_name: str, series: Sequence[Series], *, log_x: bool = False, log_y: bool = False
) -> str:
    """Lines and points. What isn't above 0 can't be shown on a logarithmic axis and is left out."""
    points = [point for each in series for point in each.points]
    x = Axis.over((point[0] for point in points), LEFT, WIDTH - RIGHT, is_log=log_x)
    y = Axis.over((point[1] for point in points), HEIGHT - BOTTOM, TOP, is_log=log_y)
    parts = [_axes(x, y, x_name, y_name)]
    for number, each in enumerate(series):
        colour = COLOURS[number % len(COLOURS)]
        shown = [(p, label) for p, label in _labelled(each) if p[0] > 0 or not log_x if p[1] > 0 or not log_y]
        places = [(x.at(px), y.at(py)) for (px, py), _ in shown]
        if each.is_line:
            path = " ".join(f"{px:.1f},{py:.1f}" for px, py in places)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for (px, py), (_, label) in zip(places, shown, strict=True):
            parts.append(
                f'<circle cx="{px:.1f}" cy="{py:.1f}" r="{2.5 if each.is_line else 3.5}" fill="{colour}" '
                f'fill-opacity="0.75"><title>{escape(label)}</title></circle>'
            )
    return _chart(title, [each.name for each in series], parts)


def bar_chart(title: str, y_name: str, bars: Mapping[str, Mapping[str, float]]) -> str:
    """A bar for each name, its parts on top of each other."""
    kinds = list(dict.fromkeys(kind for parts in bars.values() for kind in parts))
    y = Axis.over((sum(parts.values()) for parts in bars.values()), HEIGHT - BOTTOM, TOP, is_log=False)
    room = (WIDTH - LEFT - RIGHT) / max(1, len(bars))
    drawn = [_axes(None, y, "", y_name)]
    for number, (name, parts) in enumerate(bars.items()):
        left, total = LEFT + room * (number + 0.2), 0.0
        for kind, value in parts.items():
            top, bottom = y.at(total + value), y.at(total)
            colour = COLOURS[kinds.index(kind) % len(COLOURS)]
            drawn.append(
                f'<rect x="{left:.1f}" y="{top:.1f}" width="{room * 0.6:.1f}" height="{bottom - top:.1f}" '
                f'fill="{colour}"><title>{escape(f"{name}, {kind}: {value:.4g}")}</title></rect>'
            )
            total += value
        middle = left + room * 0.3
        drawn.append(f'<text x="{middle:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{escape(name)}</text>')
    return _chart(title, kinds, drawn)


def _labelled(series: Series) -> list[tuple[tuple[float, float], str]]:
    labels = series.labels or [f"{series.name}: {x:.4g}, {y:.4g}" for x, y in series.points]
    return list(zip(series.points, labels, strict=True))


def _axes(x: Axis | None, y: Axis, x_name: str, y_name: str) -> str:
    bottom = HEIGHT - BOTTOM
    parts = [f'<path d="M{LEFT},{TOP} V{bottom} H{WIDTH - RIGHT}" fill="none" stroke="#444"/>']
    for tick in y.ticks:
        place = y.at(tick)
        parts.append(f'<path d="M{LEFT},{place:.1f} H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{place + 4:.1f}" text-anchor="end">{_short(tick)}</text>')
    for tick in x.ticks if x is not None else ():
        assert x is not None
        place = x.at(tick)
        parts.append(f'<text x="{place:.1f}" y="{bottom + 16}" text-anchor="middle">{_short(tick)}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH) / 2:.0f}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_name)}</text>')
    middle = (TOP + bottom) / 2
    parts.append(
        f'<text x="14" y="{middle:.0f}" text-anchor="middle" transform="rotate(-90 14 {middle:.0f})">'
        f"{escape(y_name)}</text>"
    )
    return "".join(parts)


def _chart(title: str, names: Sequence[str], parts: Iterable[str]) -> str:
    legend = "".join(
        f'<g transform="translate({LEFT + (i % 3) * (WIDTH - LEFT) // 3} {30 + i // 3 * 16})">'
        f'<rect width="11" height="11" fill="{COLOURS[i % len(COLOURS)]}"/>'
        f'<text x="16" y="10">{escape(name)}</text></g>'
        for i, name in enumerate(names)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="sans-serif" font-size="12" role="img"><title>{escape(title)}</title>'
        f'<rect width="100%" height="100%" fill="white"/>'
        f'<text x="{LEFT}" y="20" font-size="14" font-weight="bold">{escape(title)}</text>'
        f"{legend}{''.join(parts)}</svg>"
    )


def _short(value: float) -> str:
    for unit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:g}{letter}"
    return f"{value:g}"
