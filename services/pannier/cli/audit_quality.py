"""`pannier audit quality`: an engine's log-probabilities beside those of the model uncut, on a text it hasn't seen."""

import asyncio
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pannier.cli.report import FILE_WIDTH, Report
from pannier.runtime.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from transformers import PreTrainedModel

    from pannier.audit.quality import Difference, Passage
    from pannier.cli.engines import Running
    from pannier.cli.stack import ServeOptions
    from pannier.runtime.model_source import ModelSource

HELD_OUT = "heldout.txt"
"""A file of a model's folder with text that it wasn't trained on."""
HELD, OWN = "held-out", "decoded"
SEQUENCES = 16
METRICS = {
    "mean_logprob": "nats/token",
    "perplexity": "",
    "mean": "nats/token",
    "mean_absolute": "nats/token",
    "largest": "nats",
}

Scores = dict[str, "list[Passage]"]
"""Of one engine: passages of the text, and what it decoded itself behind their first halves."""


def quality(
    model: Annotated[str, typer.Argument(help="A folder, a hub's OWNER/NAME, or 'embedded'.")],
    text: Annotated[
        Path | None, typer.Option(help="A text that the model hasn't seen; heldout.txt of its folder if there is one.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=4, help="Of the text's beginning.")] = 2000,
    context: Annotated[int, typer.Option(min=4, help="Tokens of the windows that it is cut into.")] = 250,
    decode: Annotated[int, typer.Option(min=1, help="Tokens that are decoded behind half of each window.")] = 16,
    chunk: Annotated[
        int, typer.Option(min=SEQUENCES, help="Rows of a step: what is before them is read from the KV cache.")
    ] = 32,
    dtype: Annotated[str, typer.Option(help="As in `serve`.")] = "auto",
    kv_dtype: Annotated[list[str] | None, typer.Option(help="As in `serve`; may be repeated.")] = None,
    attention: Annotated[str, typer.Option(help="Attention workers of the offloaded stack, as in `serve`.")] = "1",
    reference: Annotated[str, typer.Option(metavar="DTYPE", help="What transformers computes in.")] = "float32",
    tolerance: Annotated[
        float, typer.Option(min=0, help="Exit with 1 if an engine's mean is further from the reference's, in nats.")
    ] = 0.01,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")] = False,
) -> None:
    """Compare log-probabilities per token: monolithic and offloaded, for each KV type, with transformers."""
    from pannier.audit.quality import windows
    from pannier.cli.stack import ServeOptions
    from pannier.runtime.model_source import resolve

    source = resolve(model)
    passages = windows(_tokens(source, text), context, tokens)
    if not passages:
        raise ConfigError("the text has fewer than two tokens")
    options = ServeOptions(
        model=model, dtype=dtype, max_batch_tokens=chunk, max_sequences=SEQUENCES, prefix_cache=False
    )
    engines = {"monolithic": replace(options, monolithic=True)}
    for each in dict.fromkeys(kv_dtype or ["auto"]):
        engines[f"offloaded, KV {each}"] = replace(options, attention=attention, kv_dtype=each)
    scores: dict[str, Scores] = {}
    used = ""
    for name, engine in engines.items():
        scores[name], used = asyncio.run(_ask(engine, passages, decode))
        print(f"{name}: done", file=sys.stderr)
    found = _compared(source, scores, reference, used)
    report = _report(model, found)
    _print(report)
    if as_json:
        print(report.to_json())
    worst = max(abs(each.mean) for (_, name), each in found.items() if name in engines)
    if worst > tolerance:
        print(f"a mean is {worst:.4f} nats from transformers'; --tolerance is {tolerance}", file=sys.stderr)
        raise typer.Exit(1)


def _tokens(source: "ModelSource", text: Path | None) -> list[int]:
    if source.path is None:
        raise ModelError(f"{source.name} has random weights and no tokenizer: there is no quality to compare")
    file = text or source.path / HELD_OUT
    if text is None and not file.is_file():
        raise ConfigError(f"{source.name} brings no {HELD_OUT}; give a text that it hasn't seen with --text")
    try:
        content = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} can't be read as text: {error}") from error
    from transformers import AutoTokenizer

    ids: list[int] = AutoTokenizer.from_pretrained(source.path)(content, add_special_tokens=False)["input_ids"]
    return ids


async def _ask(options: "ServeOptions", passages: "Sequence[tuple[int, ...]]", decode: int) -> "tuple[Scores, str]":
    """What one engine says, and the type in which it computes."""
    from pannier.cli.engines import running

    async with running(options) as stack:
        scores = await stack.work(_score(stack, passages, decode))
        processes = (await stack.client.status())["processes"]
    return scores, next(each["dtype"] for each in processes if each["role"] == "compute")


async def _score(stack: "Running", passages: "Sequence[tuple[int, ...]]", decode: int) -> Scores:
    from pannier.audit.quality import Passage

    async def of_text(tokens: tuple[int, ...]) -> Passage:
        found = await stack.client.complete(tokens, max_tokens=1, temperature=0.0, prompt_logprobs=0)
        return Passage(tokens, 1, tuple(each.logprob for each in found.prompt_logprobs))

    async def of_own(tokens: tuple[int, ...]) -> Passage:
        prompt = tokens[: len(tokens) // 2]
        found = await stack.client.complete(prompt, max_tokens=decode, temperature=0.0, logprobs=0, ignore_eos=True)
        return Passage(prompt + found.tokens, len(prompt), tuple(each.logprob for each in found.logprobs))

    held = await asyncio.gather(*[of_text(tokens) for tokens in passages])
    return {HELD: list(held), OWN: list(await asyncio.gather(*[of_own(tokens) for tokens in passages]))}


def _compared(
    source: "ModelSource", scores: dict[str, Scores], reference: str, used: str
) -> "dict[tuple[str, str], Difference]":
    """(case, engine) -> how far it is from the reference; transformers in the engine's type among the engines."""
    import torch

    from pannier.audit.quality import difference, scored

    exact, truth = _model(source, getattr(torch, reference)), {}
    found = {}
    for name, of_engine in scores.items():
        for case, passages in of_engine.items():
            truth[case] = scored(exact, [(each.tokens, each.start) for each in passages])
            found[case, name] = difference(passages, truth[case])
    text = truth[HELD]  # the same for all engines
    found[HELD, f"transformers {reference}"] = difference(text, text)
    if used != reference:
        del exact  # make room
        rounded = scored(_model(source, getattr(torch, used)), [(each.tokens, each.start) for each in text])
        found[HELD, f"transformers {used}"] = difference(rounded, text)
    return found


def _model(source: "ModelSource", dtype: "torch.dtype") -> "PreTrainedModel":
    from transformers import AutoModelForCausalLM, PreTrainedModel

    assert source.path is not None
    model = AutoModelForCausalLM.from_pretrained(source.path, dtype=dtype)
    assert isinstance(model, PreTrainedModel)
    model.train(False)
    return model


def _report(model: str, found: "dict[tuple[str, str], Difference]") -> Report:
    report = Report("audit quality")
    for (case, name), each in found.items():
        for metric, unit in METRICS.items():
            report.add(f"{model} {case}, {each.count} tokens", name, metric, unit, [getattr(each, metric)])
    return report


def _print(report: Report) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else FILE_WIDTH)
    for case in dict.fromkeys(row.case for row in report.rows):
        table = Table(box=None, pad_edge=False)
        table.add_column("engine")
        for heading in ("log-probability", "perplexity", "to the reference: mean", "mean of sizes", "largest"):
            table.add_column(heading, justify="right")
        rows = [row for row in report.rows if row.case == case]
        for name in dict.fromkeys(row.engine for row in rows):
            table.add_row(name, *(f"{row.value:.4f}" for row in rows if row.engine == name))
        console.print(case)
        console.print(table)
