"""`pannier plan --pairs`: known pairs of pools in one table, each with its verdict."""

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from pannier.cli.numbers import shown, times
from pannier.cli.plan_inputs import model_sizes
from pannier.cli.plan_report import add_engine, case_of
from pannier.cli.report import FILE_WIDTH, Report
from pannier.planner.catalogue import Catalogue, expectation
from pannier.planner.devices import Shares
from pannier.planner.mix import Mix
from pannier.planner.pairs import Judged, judge_pairs, read_pairs
from pannier.planner.search import Question

if TYPE_CHECKING:
    from rich.table import Table


def show_pairs(asked: Question, catalogue: Catalogue, shares: Shares, *, as_json: bool) -> None:
    """Judge them under the options of the command; each pair has its own model, and both lengths."""
    from rich.console import Console

    def question_of(model: str, mix: Mix) -> Question:
        return replace(asked, model=model_sizes(model), mix=mix)

    pairs = read_pairs()
    found = list(judge_pairs(pairs, catalogue, question_of, shares))
    width = None if sys.stdout.isatty() else FILE_WIDTH + 80
    console = Console(highlight=False, markup=False, soft_wrap=True, width=width)
    console.print(f"prices {catalogue.prices}; {pairs.note}")
    names = dict.fromkeys(name for each in found for name in (each.pair.compute, each.pair.attention))
    for note in dict.fromkeys(note for name in names if (note := expectation(name))):
        console.print(note)
    console.print(_table(found))
    if as_json:
        print(_report(found).to_json("homogeneous"))


def _table(found: list[Judged]) -> "Table":
    from rich.table import Table

    columns = ("compute + attention", "model", "requests", "dtype", "best division", "$/Mtok", "homogeneous")
    table = Table(*columns, "gain", "of compute alone", "network free", "", box=None, pad_edge=False)
    for each in found:
        pair, offloaded, rival = each.pair, each.answer.offloaded, each.answer.homogeneous
        division = f"{offloaded.layout.compute_devices} + {offloaded.layout.attention_devices}" if offloaded else "-"
        free = each.without_network.gain
        table.add_row(
            f"{pair.compute} + {f'{pair.sockets} {pair.attention}, {pair.link}' if pair.sockets else pair.attention}",
            pair.model.removeprefix("random:"),
            each.lengths.name,
            each.dtype,
            division,
            shown(offloaded.figures.usd_per_mtok) if offloaded else "-",
            f"{shown(rival[1].usd_per_mtok)} on {rival[1].devices} {rival[0].kind.device.name}"
            if rival
            else "none fits",
            f"{each.verdict.gain.product:.2f}x" if each.verdict.gain else "-",
            times(each.verdict.of_compute_alone),
            f"{free.product:.2f}x" if free else "-",
            f"{'pays' if each.verdict.pays else 'does not pay'}: {each.reason}",
        )
    return table


def _report(found: list[Judged]) -> Report:
    report = Report("plan --pairs")
    for each in found:
        case = f"{each.pair.compute} + {each.pair.attention}, {case_of(each.question)}"
        if each.answer.offloaded:
            add_engine(report, case, "offloaded", each.answer.offloaded.figures)
        if each.answer.homogeneous:
            add_engine(report, case, "homogeneous", each.answer.homogeneous[1])
        report.settings[case] = {"disaggregate": each.verdict.pays, "because": each.verdict.sentence, "so": each.reason}
    return report
