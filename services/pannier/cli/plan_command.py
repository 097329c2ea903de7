"""`pannier plan`: which devices to serve a model on, what that gives and costs, and whether to disaggregate at all."""

from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pannier.cli.plan_pair import Given, best_pair, plan_pair, show
from pannier.runtime.errors import ConfigError

if TYPE_CHECKING:
    from pannier.planner.devices import Shares

MODEL = (
    "A folder with a config.json, random:SHAPE, a model of the Lamina paper such as LLaMA3-70B, or numbers: "
    "weights_gb=16,layers=32,width=4096,queries_per_kv=4,head=128."
)


def plan(
    model: Annotated[str, typer.Option(help=MODEL)] = "random:llama-8b",
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 1155,
    output: Annotated[int, typer.Option(min=1, help="Tokens of each output.")] = 211,
    trace: Annotated[Path | None, typer.Option(help="Lengths of an Azure csv or a Mooncake jsonl instead.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the trace's first requests.")] = None,
    compute: Annotated[
        str | None, typer.Option(metavar="[Nx]INSTANCE", help="Of the compute pool: g6.xlarge, or 2xg6.xlarge.")
    ] = None,
    attention: Annotated[
        str | None, typer.Option(metavar="[Nx]INSTANCE", help="Of the attention pool; without both: all pairs.")
    ] = None,
    tpot: Annotated[float | None, typer.Option(metavar="MS", help="Longest time per output token.")] = None,
    ttft: Annotated[
        float | None, typer.Option(metavar="MS", help="Longest time to first token, without queue.")
    ] = None,
    objective: Annotated[str, typer.Option(metavar="cost|throughput", help="What to make best.")] = "cost",
    budget: Annotated[float | None, typer.Option(metavar="USD", help="Dollars an hour at most.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")] = "auto",
    flows: Annotated[int, typer.Option(min=1, help="Connections of each link, as in `serve`.")] = 4,
    flow_gbps: Annotated[
        float | None, typer.Option(help="Of one connection; as in one placement group if not given.")
    ] = None,
    link_gbps: Annotated[
        float | None, typer.Option(help="Of every device each way, in place of its instance's.")
    ] = None,
    round_trip: Annotated[float, typer.Option(metavar="US", help="Of an empty exchange; pannier bench link.")] = 200.0,
    prefill: Annotated[bool, typer.Option(help="Prompts are computed by the same devices.")] = True,
    shares: Annotated[
        str, typer.Option(metavar="W,F,A,M", help="Of advertised rates: reading weights, FLOPs, attention; of memory.")
    ] = "0.6,0.45,0.8,0.9",
    catalogue: Annotated[Path | None, typer.Option(help="A file whose rows replace or add to the catalogue's.")] = None,
    profile: Annotated[
        list[Path] | None, typer.Option(help="What pannier bench device measured; wins over the catalogue.")
    ] = None,
    save: Annotated[Path | None, typer.Option(help="Write the plan for pannier simulate --plan.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with plots.")] = None,
    pairs: Annotated[bool, typer.Option("--pairs", help="Known pairs of pools in a table instead: which pay.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")] = False,
) -> None:
    """Say how to divide instances into compute and attention pools, what that costs, and whether it pays at all.

    A cost model: rooflines at a share of the advertised rates, or at measured ones; nothing runs.
    """
    from pannier.cli.plan_inputs import mix_of, model_sizes, pool_of
    from pannier.planner.catalogue import load_catalogue
    from pannier.planner.figures import Goal
    from pannier.planner.offloaded import Wire
    from pannier.planner.profile import read_profile
    from pannier.planner.search import Question
    from pannier.planner.sensitivity import GIGABIT

    if objective not in ("cost", "throughput"):
        raise ConfigError(f"objective is {objective!r}; it must be cost or throughput")
    if objective == "throughput" and budget is None:
        raise ConfigError("the most throughput is without end unless there is a --budget")
    if (compute is None) != (attention is None):
        raise ConfigError("give both --compute and --attention, or neither for all pairs")
    known = load_catalogue(catalogue)
    wire = Wire(
        round_trip_s=round_trip / 1e6,
        flow=GIGABIT * (flow_gbps or known.limits.flow_gbps_in_placement_group),
        flows=flows,
        limit=None if link_gbps is None else GIGABIT * link_gbps,
    )
    question = Question(
        model=model_sizes(model),
        mix=mix_of(prompt, output, trace, limit),
        goal=Goal(*(inf if ms is None else ms / 1e3 for ms in (tpot, ttft))),
        objective=objective,
        budget=inf if budget is None else budget,
        wire=wire,
        has_prefill=prefill,
    )
    rates = Given(known, _shares(shares), tuple(read_profile(path) for path in profile or ()), dtype)
    if pairs:
        from pannier.cli.plan_pairs import show_pairs

        show_pairs(question, known, rates.shares, as_json=as_json)
        return
    if compute is None or attention is None:
        found = best_pair(question, rates)
    else:
        found = plan_pair(question, rates, pool_of("--compute", compute), pool_of("--attention", attention))
    show(found, html=html, save=save, as_json=as_json)


def _shares(given: str) -> "Shares":
    from pannier.planner.devices import Shares

    try:
        shares = Shares(*(float(part) for part in given.split(",")))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"shares are {given!r}; they must be up to four numbers such as 0.6,0.45,0.8,0.9") from error
    if not all(0 < share <= 1 for share in shares):
        raise ConfigError(f"shares are {given!r}; each must be above 0 and at most 1")
    return shares
