"""`pannier bench offline`: a batch of requests through our stack, and through transformers, in one run.

Every engine is started first; then the repeats alternate between them, while those that aren't measured sleep.
"""

import asyncio
import sys
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pannier.cli.bench_budgets import budgets, compare
from pannier.cli.budget_report import print_budgets
from pannier.cli.engines import PEERS, Engine, Timing, stack, transformers
from pannier.cli.load import Load, vocab_size
from pannier.cli.report import Report

if TYPE_CHECKING:
    from pannier.cli.stack import ServeOptions

WARM_UP_TOKENS = 16


def offline(
    model: Annotated[str, typer.Option(help="A folder, 'embedded', or random:SHAPE.")],
    requests: Annotated[int, typer.Option(min=1)] = 32,
    input: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 128,
    output: Annotated[int, typer.Option(min=2, help="Tokens of each completion.")] = 128,
    trace: Annotated[
        Path | None, typer.Option(help="Lengths of its first requests instead: an Azure csv or a Mooncake jsonl.")
    ] = None,
    max_length: Annotated[
        int, typer.Option(min=2, help="Of the trace's longest request, prompt and output; all are scaled alike.")
    ] = 512,
    against: Annotated[
        list[str] | None, typer.Option(metavar="|".join(PEERS), help="Another engine to time beside; may be repeated.")
    ] = None,
    attention: Annotated[str, typer.Option(help="Attention workers of the offloaded stack, as in `serve`.")] = "1",
    attention_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="For KV blocks, per attention worker, as in 2GB.")
    ] = None,
    kv_budget: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE,...",
            help="For KV on the monolithic device, as in 64MB: time each beside offloaded while as many requests "
            "decode as fit, and predict it before.",
        ),
    ] = None,
    cpu_isa: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Time our stacks with this build of the attention operators, too: generic, avx2 and so on, or "
            "'none' for torch's operators; may be repeated.",
        ),
    ] = None,
    lanes: Annotated[int | None, typer.Option(help="As in `serve`.")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float32 or float16, for every engine.")] = "bfloat16",
    max_batch_tokens: Annotated[int | None, typer.Option(help="As in `serve`.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Alternating repeats of each engine.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")] = False,
) -> None:
    """Time a batch of requests: offloaded, monolithic, and other engines if asked, on the same weights."""
    peers = tuple(dict.fromkeys(against or ()))
    for peer in peers:
        if peer not in PEERS:
            raise typer.BadParameter(f"{peer!r} is not known; it must be {' or '.join(PEERS)}", param_hint="--against")
    from pannier.cli.stack import ServeOptions

    options = ServeOptions(
        model=model, dtype=dtype, lanes=lanes, max_batch_tokens=max_batch_tokens, max_sequences=max(64, requests)
    )
    offloaded = replace(options, attention=attention, attention_memory=attention_memory)
    load = Load.equal(requests, input, output) if trace is None else Load.of_trace(trace, requests, max_length)
    isas = _isas(cpu_isa or [])
    base = (*(peers or ("monolithic",)), *(f"{kind}, {isa}" for isa in isas for kind in ("monolithic", "offloaded")))
    if kv_budget is not None:
        if peers or isas or trace is not None:
            raise typer.BadParameter("goes with none of --against, --cpu-isa and --trace", param_hint="--kv-budget")
        alone = budgets(options, kv_budget)
        report, base = asyncio.run(compare(offloaded, alone, load, repeats)), tuple(alone)
        print_budgets(report)
    else:
        report = asyncio.run(_measure(offloaded, replace(options, monolithic=True), peers, isas, load, repeats))
        report.print(*base)
    if as_json:
        print(report.to_json(*base))


def _isas(named: list[str]) -> tuple[str, ...]:
    """Raises `BadParameter` for a build that isn't known, and for one that this processor can't run."""
    from pannier.ops.native import available, choose, cpu_flags

    for name in named:
        try:
            choose(name, cpu_flags(), available())
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--cpu-isa") from error
    return tuple(dict.fromkeys(named))


async def _measure(
    offloaded: "ServeOptions",
    monolithic: "ServeOptions",
    peers: tuple[str, ...],
    isas: tuple[str, ...],
    load: Load,
    repeats: int,
) -> Report:
    from pannier.ops.native import ISA_VARIABLE

    options, vocabulary = offloaded, vocab_size(offloaded.model)
    found: dict[str, list[Timing]] = {}
    async with AsyncExitStack() as running:
        engines: dict[str, Engine] = {
            "offloaded": await running.enter_async_context(stack(offloaded)),
            "monolithic": await running.enter_async_context(stack(monolithic)),
        }
        for isa in isas:
            for kind, chosen in (("offloaded", offloaded), ("monolithic", monolithic)):
                engine = await running.enter_async_context(stack(chosen, **{ISA_VARIABLE: isa}))
                engines[f"{kind}, {isa}"] = engine
        for peer in peers:
            assert options.dtype is not None
            engines[peer] = await running.enter_async_context(transformers(peer, options.model, options.dtype))
        for engine in engines.values():
            await engine.run(load.shortened(WARM_UP_TOKENS).asks(-1, vocabulary))
        for repeat in range(repeats):
            asks = load.asks(repeat, vocabulary)
            for name, engine in engines.items():
                timing = Timing.of(asks, await engine.run(asks))
                found.setdefault(name, []).append(timing)
                print(f"{name}: {timing.total_s:.2f} s", file=sys.stderr)
    report = Report("bench offline", settings={name: engine.settings for name, engine in engines.items()})
    for name, timings in found.items():
        _report(report, f"{options.model} {load.name} {options.dtype}", name, timings)
    return report


def _report(report: Report, case: str, engine: str, timings: list[Timing]) -> None:
    total = [(each.prompt_tokens + each.output_tokens) / each.total_s for each in timings]
    report.add(case, engine, "total_tokens_per_s", "tokens/s", total)
    report.add(case, engine, "output_tokens_per_s", "tokens/s", [each.output_tokens / each.total_s for each in timings])
    if all(each.decode_tokens for each in timings):  # of very unlike requests the last may begin when all others end
        decode = [each.decode_tokens / each.decode_s for each in timings]
        report.add(case, engine, "decode_tokens_per_s", "tokens/s", decode)
