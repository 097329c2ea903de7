"""One plan: of two given kinds of instances, or of the best two of the catalogue."""

import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from pannier.cli.report import FILE_WIDTH
from pannier.runtime.errors import ConfigError

if TYPE_CHECKING:
    from pannier.planner.catalogue import Catalogue
    from pannier.planner.devices import Kind, Shares
    from pannier.planner.figures import Figures
    from pannier.planner.profile import Profile
    from pannier.planner.search import Answer, Question
    from pannier.planner.verdict import Verdict

FEW = (1, 2, 4, 8)
"""Instances of a pool that are tried when there are many pairs."""
Pool = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class Given:
    """What rates come from, and the dtype that was asked for."""

    catalogue: "Catalogue"
    shares: "Shares"
    profiles: "tuple[Profile, ...]"
    dtype: str


@dataclass(frozen=True)
class Planned:
    """A question, its answer, and what is to be said beside it."""

    question: "Question"
    answer: "Answer"
    verdict: "Verdict"
    notes: list[str]


def plan_pair(question: "Question", given: Given, compute: Pool, attention: Pool) -> Planned:
    """Of two kinds of instances. Raises `ConfigError` where the catalogue lacks a figure."""
    from pannier.cli.plan_inputs import kinds_of

    kinds = kinds_of(given.catalogue, (compute[0], attention[0]), given.dtype, given.shares, given.profiles)
    asked = replace(question, compute_counts=compute[1], attention_counts=attention[1])
    return _planned(asked, given, *kinds)


def best_pair(question: "Question", given: Given) -> Planned:
    """Of all pairs of the catalogue's families, each by its cheapest size, against every homogeneous engine of them."""
    from pannier.cli.plan_inputs import candidates
    from pannier.planner.search import Answer, best_of
    from pannier.planner.verdict import judge

    few = replace(question, compute_counts=FEW, attention_counts=FEW)
    names, plans = candidates(given.catalogue), []
    for compute, attention in product(names, names):
        with suppress(ConfigError):  # where a figure isn't established
            plans.append(plan_pair(few, given, (compute, FEW), (attention, FEW)))
    offloaded = best_of(question, [p for p in plans if p.answer.offloaded], _offloaded)
    rivals = [plan.answer.homogeneous for plan in plans if plan.answer.homogeneous]
    if offloaded is None and not rivals:
        raise ConfigError("no instances of the catalogue can serve this model within the goal and the budget")
    base = offloaded or plans[0]
    tried = tuple(each for plan in plans for each in plan.answer.tried)
    answer = Answer(
        base.answer.offloaded,
        best_of(question, rivals, lambda each: each[1]),
        base.answer.alone,
        tried,
        tuple(dict.fromkeys(figures for _, figures in rivals)),
        base.answer.refused,
    )
    notes = [f"the best of {len(plans)} pairs of {len(names)} kinds of instances", *base.notes]
    return Planned(base.question, answer, judge(answer), notes)


def show(planned: Planned, *, html: Path | None, save: Path | None, as_json: bool) -> None:
    """Tables for people, and what else was asked for."""
    from rich.console import Console

    from pannier.cli.plan_page import write_page
    from pannier.cli.plan_report import case_of, plan_report, print_plan
    from pannier.planner.saved import SavedPlan, write_plan

    width = None if sys.stdout.isatty() else FILE_WIDTH
    console = Console(highlight=False, markup=False, soft_wrap=True, width=width)
    print_plan(console, planned.question, planned.answer, planned.verdict, planned.notes)
    if save is not None:
        if planned.answer.offloaded is None:
            raise ConfigError("there is no offloaded plan to be saved")
        found = planned.answer.offloaded
        write_plan(save, SavedPlan.of(case_of(planned.question), found.layout, found.figures))
    if html is not None:
        write_page(html, planned.question, planned.answer, planned.verdict, planned.notes)
    if as_json:
        print(plan_report(planned.question, planned.answer, planned.verdict, planned.notes).to_json("homogeneous"))


def _planned(question: "Question", given: Given, compute: "Kind", attention: "Kind", dtype: str, why: str) -> Planned:
    from pannier.planner.catalogue import expectation
    from pannier.planner.search import search
    from pannier.planner.verdict import judge

    asked = replace(question, model=question.model.in_dtype(dtype))
    answer = search(asked, compute, attention)
    expected = (expectation(kind.name) for kind in (compute, attention))
    notes = [
        f"{dtype}: {why}; prices {given.catalogue.prices}",
        *dict.fromkeys(note for note in (*expected, *compute.notes, *attention.notes) if note),
    ]
    return Planned(asked, answer, judge(answer), notes)


def _offloaded(planned: Planned) -> "Figures":
    assert planned.answer.offloaded is not None
    return planned.answer.offloaded.figures
