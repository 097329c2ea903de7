"""What a plan says to people and to programs."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pannier.cli.numbers import shown
from pannier.cli.report import Report
from pannier.planner.figures import Figures, Goal
from pannier.planner.offloaded import Offloaded
from pannier.planner.search import Answer, Question
from pannier.planner.sensitivity import Changed, is_enough, over_contexts, over_links, with_link
from pannier.planner.verdict import Verdict
from pannier.scheduler.placement import GroupPlan

if TYPE_CHECKING:
    from rich.console import Console

MS = 1e3


def metrics(figures: Figures) -> Iterator[tuple[str, float, str]]:
    """Every figure of an engine: name, value, unit."""
    step = figures.step
    yield "tokens_per_s", figures.tokens_per_s, "tokens/s"
    yield "usd_per_mtok", figures.usd_per_mtok, "$"
    yield "usd_per_hour", figures.usd_per_hour, "$"
    yield "tpot", MS * figures.tpot_s, "ms"
    if step.ttft_s is not None:
        yield "ttft", MS * step.ttft_s, "ms"
    yield "devices", figures.devices, "devices"
    yield "sequences", figures.sequences, "sequences"
    yield "rows_per_lane_step", step.rows, "rows"
    yield "lane_step", MS * step.bound.seconds, "ms"
    for part, seconds in zip(("compute", "attention", "transfer"), step.parts, strict=True):
        yield part, MS * seconds, "ms"
    yield "exposed", MS * step.exposed_s, "ms"
    if step.sent_bytes:
        yield "sent", step.sent_bytes, "bytes"
        yield "returned", step.returned_bytes, "bytes"


def add_engine(report: Report, case: str, engine: str, figures: Figures) -> None:
    """An engine's figures as rows of the long form."""
    for metric, value, unit in metrics(figures):
        report.add(case, engine, metric, unit, [value])


def case_of(question: Question) -> str:
    """The model and what is asked of it."""
    return f"{question.model.name}, {question.mix.name}"


def plan_report(question: Question, answer: Answer, verdict: Verdict, notes: list[str]) -> Report:
    """Both engines' figures, and in the settings the division, the verdict and what would change it."""
    report, case = Report("plan"), case_of(question)
    if answer.offloaded is not None:
        layout = answer.offloaded.layout
        add_engine(report, case, "offloaded", answer.offloaded.figures)
        report.settings["offloaded"] = division(layout)
        changes = [*over_contexts(layout, question.goal), *over_links(layout, question.goal)]
        report.settings["tokens/s if"] = {
            each.what: None if each.figures is None else each.figures.tokens_per_s for each in changes
        }
    if answer.homogeneous is not None:
        engine, figures = answer.homogeneous
        add_engine(report, case, "homogeneous", figures)
        together = {"devices at once": engine.at_once, "stages": engine.stages}
        report.settings["homogeneous"] = {"instance": engine.kind.name, "device": engine.kind.device.name, **together}
    report.settings["verdict"] = {"disaggregate": verdict.pays, "because": verdict.sentence}
    report.settings["notes"] = {str(number): note for number, note in enumerate(notes, 1)}
    if verdict.gain is not None:
        report.settings["gain"] = verdict.gain._asdict()
    return report


def division(layout: Offloaded) -> dict[str, object]:
    """How the devices are divided, in the words of `pannier serve`."""
    heads = sorted({_heads(group) for group in layout.groups})
    return {
        "compute": f"{layout.compute_devices // layout.compute.devices} x {layout.compute.name}",
        "attention": f"{layout.attention_devices // layout.attention.devices} x {layout.attention.name}",
        "compute device": layout.compute.device.name,
        "attention device": layout.attention.device.name,
        "compute devices": layout.compute_devices,
        "attention devices": layout.attention_devices,
        "replicas": layout.replicas,
        "stages": layout.stages,
        "lanes": layout.lanes,
        "groups": len(layout.groups),
        "heads": "; ".join(heads),
        "flows": layout.wire.flows,
    }


def print_plan(console: "Console", question: Question, answer: Answer, verdict: Verdict, notes: list[str]) -> None:
    """Tables, the verdict, and what it rests on."""
    console.print(case_of(question))
    for note in notes:
        console.print(f"  {note}")
    _print_figures(console, answer)
    console.print(verdict.sentence)
    if verdict.gain is not None:
        console.print(f"  tokens per dollar, of the homogeneous engine's: {verdict.gain}")
    if verdict.of_compute_alone is not None:
        console.print(f"  of the compute pool's kind alone: {verdict.of_compute_alone:.2f}")
    if verdict.bound:
        console.print(f"  {verdict.bound}")
    if answer.offloaded is not None:
        layout = answer.offloaded.layout
        console.print(", ".join(f"{name} {value}" for name, value in division(layout).items()))
        _print_sensitivity(console, layout, question.goal)


def _print_figures(console: "Console", answer: Answer) -> None:
    from rich.table import Table

    columns = {}
    if answer.offloaded is not None:
        columns["offloaded"] = answer.offloaded.figures
    if answer.homogeneous is not None:
        columns["homogeneous"] = answer.homogeneous[1]
    table = Table(box=None, pad_edge=False)
    for name in ("", *columns, ""):
        table.add_column(name, justify="right" if name else "left")
    found = {name: {metric: value for metric, value, _ in metrics(each)} for name, each in columns.items()}
    units = {metric: unit for each in columns.values() for metric, _, unit in metrics(each)}
    for metric, unit in units.items():
        values = [shown(each[metric]) if metric in each else "" for each in found.values()]
        table.add_row(metric.replace("_", " "), *values, unit)
    console.print(table)


def _print_sensitivity(console: "Console", layout: Offloaded, goal: Goal) -> None:
    from rich.table import Table

    table = Table("the same devices with", "tokens/s", "a step held by", "enough", box=None, pad_edge=False)
    for each in over_contexts(layout, goal):
        table.add_row(f"a context of {each.what}", *_changed(each), "")
    for each in over_links(layout, goal):
        enough = is_enough(layout, goal, each.figures)
        table.add_row(f"links of {each.what}", *_changed(each), "yes" if enough else "no")
    unlimited = Changed("no limit", with_link(layout, 1e18).figures(goal))
    table.add_row("links without limit", *_changed(unlimited), "")
    console.print(table)


def _changed(changed: Changed) -> tuple[str, str]:
    if changed.figures is None:
        return "none", "a goal is not kept, or nothing fits"
    return f"{changed.figures.tokens_per_s:,.0f}", changed.figures.step.bound.held_by


def _heads(group: GroupPlan) -> str:
    return "+".join(str(shard.heads[0].stop - shard.heads[0].start) for shard in group.shards)
