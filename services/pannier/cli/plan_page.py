"""A plan as a page: the verdict, the figures, and four plots."""

from collections.abc import Iterator
from pathlib import Path

from pannier.cli import page
from pannier.cli.charts import Series, bar_chart, line_chart
from pannier.cli.numbers import shown
from pannier.cli.plan_report import case_of, division, metrics
from pannier.planner.devices import Device
from pannier.planner.figures import Figures
from pannier.planner.homogeneous import Homogeneous
from pannier.planner.offloaded import Offloaded
from pannier.planner.search import Answer, Question
from pannier.planner.sensitivity import GIGABIT, LINKS, paper_bandwidth, smallest_link
from pannier.planner.verdict import Verdict

MS, POINTS = 1e3, 24
MOST_POINTS = 1500
"""Of the divisions that were tried: more would make a page that no browser likes."""


def write_page(path: Path, question: Question, answer: Answer, verdict: Verdict, notes: list[str]) -> None:
    """Write the page into a file."""
    parts = [page.paragraph(verdict.sentence, "verdict"), *(page.paragraph(note) for note in notes)]
    if verdict.gain is not None:
        parts.append(page.paragraph(f"Tokens per dollar, of the homogeneous engine's: {verdict.gain}."))
    if verdict.bound:
        parts.append(page.paragraph(verdict.bound))
    parts.append(_table(answer))
    if answer.offloaded is not None:
        rows = [(name, str(value)) for name, value in division(answer.offloaded.layout).items()]
        parts.append(page.table(("the best division", ""), rows))
    parts.append(page.charts(_charts(answer)))
    page.write(path, f"Pannier plan: {case_of(question)}", parts)


def _table(answer: Answer) -> str:
    engines = _engines(answer)
    found = {name: {metric: value for metric, value, _ in metrics(each)} for name, each in engines.items()}
    units = {metric: unit for each in engines.values() for metric, _, unit in metrics(each)}
    rows = [
        (metric.replace("_", " "), *(shown(each[metric]) if metric in each else "" for each in found.values()), unit)
        for metric, unit in units.items()
    ]
    return page.table(("", *engines, ""), rows)


def _engines(answer: Answer) -> dict[str, Figures]:
    engines = {}
    if answer.offloaded is not None:
        engines["offloaded"] = answer.offloaded.figures
    if answer.homogeneous is not None:
        engines["homogeneous"] = answer.homogeneous[1]
    return engines


def _charts(answer: Answer) -> Iterator[str]:
    yield _throughput_and_cost(answer)
    if answer.offloaded is not None:
        layout, figures = answer.offloaded.layout, answer.offloaded.figures
        yield _roofline(layout, figures, answer.homogeneous[0] if answer.homogeneous else None)
    yield _breakdown(answer)
    if answer.offloaded is not None:
        yield _bandwidth(answer.offloaded.layout, answer.offloaded.figures)


def _throughput_and_cost(answer: Answer) -> str:
    """Every division that was tried."""
    tried = answer.tried[:: 1 + len(answer.tried) // MOST_POINTS]
    series = [
        Series(
            "offloaded",
            [(each.figures.usd_per_hour, each.figures.tokens_per_s) for each in tried],
            [
                f"{each.layout.compute_devices} {each.layout.compute.device.name} + "
                f"{each.layout.attention_devices} {each.layout.attention.device.name}, "
                f"{each.layout.stages} stages: ${each.figures.usd_per_mtok:.3g}/Mtok"
                for each in tried
            ],
            is_line=False,
        ),
        Series(
            "homogeneous",
            [(each.usd_per_hour, each.tokens_per_s) for each in answer.rivals],
            [f"{each.devices} devices: ${each.usd_per_mtok:.3g}/Mtok" for each in answer.rivals],
            is_line=False,
        ),
    ]
    best = [(each.usd_per_hour, each.tokens_per_s) for each in _engines(answer).values()]
    series.append(Series("the best of each", best, list(_engines(answer)), is_line=False))
    return line_chart("Throughput and cost", "$ per hour", "tokens/s", series, log_x=True, log_y=True)


def _roofline(layout: Offloaded, figures: Figures, rival: Homogeneous | None) -> str:
    """What devices can do, and where the parts of a step lie: FLOP per byte of weights, and of K and V."""
    devices = {each.name: each for each in (layout.compute.device, layout.attention.device)}
    if rival is not None:
        devices.setdefault(rival.kind.device.name, rival.kind.device)
    series = [Series(name, list(_roof(each))) for name, each in devices.items() if each.flops is not None]
    model, rows = layout.model, figures.step.rows
    dense = rows * model.flops_per_row / model.read_bytes(rows)
    attention = model.flops_per_pair * layout.mix.context / model.kv_read_bytes(layout.mix.context)
    points = [
        (dense, _attained(layout.compute.device, dense)),
        (attention, _attained(layout.attention.device, attention)),
    ]
    labels = [f"weights, {rows:.4g} rows", f"attention, {layout.mix.context:.0f} tokens"]
    series.append(Series("parts of a step", points, labels, is_line=False))
    return line_chart("Roofline of one device", "FLOP per byte", "FLOP/s", series, log_x=True, log_y=True)


def _roof(device: Device) -> Iterator[tuple[float, float]]:
    for intensity in (10 ** (power / 8) for power in range(-4, 29)):
        yield intensity, _attained(device, intensity)


def _attained(device: Device, intensity: float) -> float:
    reached = intensity * device.weight_bandwidth
    return reached if device.flops is None else min(reached, device.flops)


def _breakdown(answer: Answer) -> str:
    bars = {}
    for name, figures in _engines(answer).items():
        parts = dict(zip(("compute", "attention", "transfer"), figures.step.parts, strict=True))
        bars[f"{name}: one step alone"] = {part: MS * seconds for part, seconds in parts.items()}
        if name == "offloaded":
            busy = figures.step.bound.seconds - figures.step.exposed_s
            bars["lane-step to lane-step"] = {"a pool is busy": MS * busy, "exposed": MS * figures.step.exposed_s}
    return bar_chart("Where a step's time goes", "ms", bars)


def _bandwidth(layout: Offloaded, figures: Figures) -> str:
    """The smallest link with which nothing waits, by batch; and the paper's formula for it."""
    most = max(2, figures.sequences)
    batches = sorted({max(1, round(most ** (number / POINTS))) for number in range(POINTS + 1)})
    ours = [(batch, smallest_link(layout, batch) / GIGABIT) for batch in batches]
    papers = [(batch, paper_bandwidth(layout, batch) / GIGABIT) for batch in batches]
    series = [Series("per device, each way", ours), Series("paper's formula, alpha 0.2", papers)]
    marks = ("PCIe 4.0 x16", "25 Gbit/s", "100 Gbit/s")
    series += [Series(name, [(batches[0], LINKS[name] / GIGABIT), (most, LINKS[name] / GIGABIT)]) for name in marks]
    return line_chart("Smallest bandwidth", "sequences", "Gbit/s", series, log_x=True, log_y=True)
