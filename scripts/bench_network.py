#!/usr/bin/env python
"""A gateway, a compute worker and two attention workers on hosts of their own: at which rate does offloading pay?

    scripts/bench network [--rates 1,5,25] [--delay-us 0,200] [--encrypt control,all] [--repeats 3] [--json] ...

The hosts are network namespaces on one switch (scripts/lab), in fp32 and with keys; their cables carry the rates that
are given, in Gbit/s each way, as far as this machine can. For each rate: what plain TCP gets of it, lane-steps with one
lane and with two, what the busier direction of the compute worker's cable carried, and tokens/s beside those of a
monolithic worker. Every stack must first say exactly what one says whose processes meet on loopback; the exit status is
1 if one doesn't. Needs root and iproute2.

All hosts share this machine's cores, and every worker has one thread. --emulate-compute and --emulate-attention put
devices in their place that only wait, as `pannier bench overlap` does; the monolithic worker's attention waits too.
"""

import argparse
import asyncio
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
from rich.console import Console
from rich.table import Table
from scripts.lab.network import Network, NoLaboratory, missing
from scripts.lab.raw_tcp import RawTcp, raw_tcp
from scripts.lab.stack import PORT, Stack, StackEnded, running

from pannier.cli.load import Ask, Load, vocab_size
from pannier.cli.overlap_report import MONOLITHIC, overlap_report
from pannier.cli.overlap_run import Run, run
from pannier.cli.report import FILE_WIDTH, Report
from pannier.cli.run_folder import run_folder
from pannier.client import AsyncClient, Client
from pannier.net.keys import make_keys
from pannier.runtime.errors import PannierError

ATTENTION_WORKERS = 2
LANES = (1, 2)
ALONE = "alone"
"""The host of stacks that use no network."""
HOSTS = ("gateway", "compute", "attention-0", "attention-1", ALONE)
PLAIN = "plain TCP"
KV_MEMORY = "256MiB"
PROVING = Load.equal(3, 24, 24)
PATIENCE_S = 600.0
COLUMNS = {
    "lane-step ms": ("lane_step",),
    "compute": ("compute",),
    "attention (exposed)": ("attention", "exposed_attention"),
    "transfer (exposed)": ("transfer", "exposed_transfer"),
    "tokens/s": ("run_tokens_per_s",),
    "Gbit/s on the link": ("link_rate",),
    "share of plain TCP": ("link_share",),
}
"""Of the table for people: metrics of the report."""


@dataclass(frozen=True)
class Case:
    """A network, and what is encrypted on it."""

    gigabits: float
    delay_us: float
    encrypt: str

    def __str__(self) -> str:
        return f"{self.gigabits:g} Gbit/s, {self.delay_us:g} us each way, encrypt {self.encrypt}"


@dataclass
class Found:
    """What was measured of a case: repeats by engine; and Gbit/s on the busier direction of compute's cable."""

    link: str
    """What kind they were of."""
    is_same: bool | None
    """Whether all stacks said what one says on loopback; None: it means nothing, for compute is emulated."""
    raw: list[RawTcp] = field(default_factory=list)
    runs: dict[str, list[Run]] = field(default_factory=dict)
    carried: dict[str, list[float]] = field(default_factory=dict)


# --- stacks -----------------------------------------------------------------------------------------------------------


@contextmanager
def stacks_on(
    network: Network, options: argparse.Namespace, encrypt: str, link_delay_us: float
) -> Iterator[dict[str, Stack]]:
    """One for each number of lanes, side by side on the same hosts."""
    with ExitStack() as all_of_them:
        stacks = {}
        for lanes in LANES:
            name = f"{lanes} lane{'s' * (lanes > 1)}"
            compute, attention = {"lanes": lanes, "link": options.link}, {"emulate_delay": link_delay_us / 1e3}
            stack = _new_stack(all_of_them, network, options, port=PORT + lanes, encrypt=encrypt)
            all_of_them.enter_context(_started(stack, options, compute, attention))
            stacks[name] = stack
        yield stacks


@contextmanager
def loopback_stack(network: Network, options: argparse.Namespace) -> Iterator[Client]:
    """The same on one host, where nothing is slow."""
    with ExitStack() as closing:
        stack = _new_stack(closing, network, options, together=ALONE, encrypt="control")
        yield closing.enter_context(_started(stack, options, {"link": options.link}))


@contextmanager
def monolithic_stack(network: Network, options: argparse.Namespace) -> Iterator[Stack]:
    """The same model in one worker, which has one thread as every worker here: a device like the others' compute."""
    with ExitStack() as closing:
        stack = _new_stack(closing, network, options, together=ALONE, encrypt="control")
        compute = {"monolithic": True, "lanes": 1, "attention_memory": KV_MEMORY}
        emulated = {"emulate_attention": options.emulate_attention}
        closing.enter_context(_started(stack, options, {**compute, **emulated}, attention_workers=0))
        yield stack


def _new_stack(closing: ExitStack, network: Network, options: argparse.Namespace, **settings: Any) -> Stack:
    return Stack(network, closing.enter_context(run_folder()), keys=options.keys, **settings)


@contextmanager
def _started(
    stack: Stack,
    options: argparse.Namespace,
    compute: dict[str, object],
    attention: Mapping[str, object] | None = None,
    attention_workers: int = ATTENTION_WORKERS,
) -> Iterator[Client]:
    most = options.requests * max(LANES)
    gateway = {
        "model": options.model,
        "max_sequences": most,
        "max_batch_tokens": max(512, most),
        "prefix_cache": False,  # every rate gets the same prompts
    }
    compute = {"model": options.model, "dtype": "float32", "emulate_compute": options.emulate_compute, **compute}
    attention = {"memory": KV_MEMORY, "emulate_attention": options.emulate_attention, **(attention or {})}
    with running(stack, gateway, compute, attention, attention_workers) as client:
        yield client


# --- measuring --------------------------------------------------------------------------------------------------------


def measure_all(network: Network, options: argparse.Namespace) -> dict[Case, Found]:
    """Every case. A delay is the network's own where the kernel can, else one that attention workers emulate."""
    found: dict[Case, Found] = {}
    has_netem = network.has_netem()
    with loopback_stack(network, options) as client:
        expected = say(client, options.model)
    with monolithic_stack(network, options) as monolithic:
        for encrypt, delay_us in product(options.encrypt, options.delay_us):
            with stacks_on(network, options, encrypt, 0.0 if has_netem else delay_us) as stacks:
                for gigabits in options.rates:
                    network.shape(gigabits, delay_us if has_netem else 0.0)
                    case = Case(gigabits, delay_us, encrypt)
                    print(case, file=sys.stderr)
                    link, is_same = prove(stacks.values(), options.model, expected)
                    found[case] = Found(link, None if options.emulate_compute else is_same)
                    measure(network, {**stacks, MONOLITHIC: monolithic}, options, found[case])
    return found


def prove(stacks: Iterable[Stack], model: str, expected: list[tuple[int, ...]]) -> tuple[str, bool]:
    """What kind of links they have, and whether all of them say what is expected."""
    is_same = True
    for stack in stacks:
        with stack.client() as client:
            links = [process["link"] for process in client.status()["processes"] if process["role"] == "compute"]
            is_same &= say(client, model) == expected
    return links[0], is_same


def say(client: Client, model: str) -> list[tuple[int, ...]]:
    """The tokens that a stack draws, asked for one request at a time: so all stacks run the same steps, bit for bit."""
    asks, patience_s = PROVING.asks(0, vocab_size(model)), PATIENCE_S
    return [
        client.complete(
            each.prompt, max_tokens=each.output, temperature=0.0, ignore_eos=True, timeout_s=patience_s
        ).tokens
        for each in asks
    ]


def measure(network: Network, stacks: dict[str, Stack], options: argparse.Namespace, found: Found) -> None:
    """Plain TCP and every stack, over and over in turn, so that what else the machine does meets all alike."""
    vocabulary = vocab_size(options.model)
    for repeat in range(-1, options.repeats):  # the first one is for warming up
        raw = raw_tcp(network, "compute", "attention-0")
        if repeat >= 0:
            found.raw.append(raw)
        for name, stack in stacks.items():
            requests = options.requests * (max(LANES) if name == MONOLITHIC else int(name.split()[0]))
            asks = Load.equal(requests, options.context, options.output).asks(repeat, vocabulary)
            before = network.traffic("compute")
            each = asyncio.run(_run(stack, asks))
            busier = max(now - then for now, then in zip(network.traffic("compute"), before, strict=True))
            if repeat >= 0:
                found.runs.setdefault(name, []).append(each)
                if name != MONOLITHIC:
                    found.carried.setdefault(name, []).append(8 * busier / each.total_s / 1e9)


async def _run(stack: Stack, asks: list[Ask]) -> Run:
    stack.check()
    async with asyncio.timeout(PATIENCE_S), AsyncClient(stack.endpoint, keys=stack.keys) as client:
        return await run(client, asks)


# --- what came of it --------------------------------------------------------------------------------------------------


def report_of(found: dict[Case, Found], options: argparse.Namespace, has_netem: bool) -> Report:
    """All figures in the form that every measuring command has."""
    report = Report("bench network")
    delayed_by = "netem" if has_netem else "the workers' own emulate_delay: this kernel has no netem"
    report.settings["network"] = {"rate": "tbf", "delay": delayed_by}
    emulated = {name: getattr(options, name) for name in ("emulate_compute", "emulate_attention")}
    for case, each in found.items():
        judged = overlap_report(str(case), each.runs, {name: value for name, value in emulated.items() if value})
        report.rows += judged.rows
        report.settings |= judged.settings
        report.settings[str(case)] = {"link": each.link, "offloading": report.settings.pop("verdict")["offloading"]}
        _add_network(report, str(case), each)
    return report


def _add_network(report: Report, case: str, found: Found) -> None:
    report.add(case, PLAIN, "rate", "Gbit/s", [raw.gigabits for raw in found.raw])
    report.add(case, PLAIN, "round_trip", "us", [raw.round_trip_us for raw in found.raw])
    plain = median(raw.gigabits for raw in found.raw)
    for name, rates in found.carried.items():
        report.add(case, name, "link_rate", "Gbit/s", rates)
        report.add(case, name, "link_share", "share", [rate / plain for rate in rates])
    if found.is_same is not None:
        report.add(case, "all lanes", "same_tokens_as_loopback", "", [float(found.is_same)])


def show(report: Report, found: dict[Case, Found]) -> None:
    """A table of each case, with what decides it; then how the network was made."""
    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else FILE_WIDTH)
    values = {(row.case, row.engine, row.metric): row.value for row in report.rows}
    settings = dict(report.settings)
    for case, each in found.items():
        rate, round_trip = (values[str(case), PLAIN, metric] for metric in ("rate", "round_trip"))
        tokens = {True: "the same tokens", False: "DIFFERENT tokens", None: "tokens mean nothing"}[each.is_same]
        console.print(f"{case}: {PLAIN} gets {rate:.3g} Gbit/s, {round_trip:.0f} us a round trip; {tokens}")
        console.print(_table(str(case), each.runs, values))
        console.print(*(f"{key} {value}" for key, value in settings.pop(str(case)).items()), "", sep="\n")
    for name, given in settings.items():
        console.print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in given.items()))


def _table(case: str, engines: Iterable[str], values: Mapping[tuple[str, str, str], float]) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("", *COLUMNS):
        table.add_column(title, justify="right" if title else "left")
    for engine in engines:
        cells = ([values.get((case, engine, metric)) for metric in metrics] for metrics in COLUMNS.values())
        table.add_row(engine, *(_cell(*each) for each in cells))
    return table


def _cell(value: float | None, exposed: float | None = None) -> str:
    return "" if value is None else f"{value:.3g}" if exposed is None else f"{value:.3g} ({exposed:.3g})"


def main() -> int:
    """Measure; the exit status is 1 when tokens differ, or nothing can be measured here."""
    options = _options()
    if (reason := missing()) is not None:
        print(f"skipped: {reason}")
        return 1
    try:
        with run_folder() as folder, Network(HOSTS) as network:
            make_keys(folder / "keys")
            options.keys = folder / "keys"
            has_netem, load = network.has_netem(), [os.getloadavg()[0]]
            found = measure_all(network, options)
            load.append(os.getloadavg()[0])
    except (NoLaboratory, StackEnded, PannierError) as error:
        print(error)
        return 1
    report = report_of(found, options, has_netem)
    report.settings["machine"] = {"load before": load[0], "load after": load[1]}
    show(report, found)
    if options.json:
        print(report.to_json("1 lane", MONOLITHIC))
    return 1 if any(each.is_same is False for each in found.values()) else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=_numbers, default="1,5,25", help="Gbit/s each way; default %(default)s")
    parser.add_argument("--delay-us", type=_numbers, default="0,200", help="each way; default %(default)s")
    parser.add_argument("--encrypt", type=_names, default="control,all", help="of control, all; default both")
    parser.add_argument("--model", default="embedded", help="default %(default)s")
    parser.add_argument("--link", default="auto", help="as the compute worker's setting; default %(default)s")
    parser.add_argument("--requests", type=int, default=8, help="rows of each lane-step; default %(default)s")
    parser.add_argument("--context", type=int, default=64, help="tokens of each prompt; default %(default)s")
    parser.add_argument("--output", type=int, default=48, help="tokens of each completion; default %(default)s")
    parser.add_argument("--emulate-compute", metavar="MS[,US]", help="as in pannier bench overlap; tokens mean nothing")
    parser.add_argument("--emulate-attention", metavar="MS[,US]", help="as in pannier bench overlap")
    parser.add_argument("--repeats", type=int, default=3, help="alternating ones; default %(default)s")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    return parser.parse_args()


def _numbers(option: str) -> list[float]:
    return [float(part) for part in option.split(",")]


def _names(option: str) -> list[str]:
    return option.split(",")


if __name__ == "__main__":
    sys.exit(main())
