"""`pannier bench serve`: requests at a rate, or so many at once, to a server that runs; what their clients see."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import islice
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pannier.cli.arrivals import at_rate, at_speed
from pannier.cli.load import Load
from pannier.cli.options import DEFAULT_ENDPOINT, Endpoint, Insecure, Keys

if TYPE_CHECKING:
    from pannier.cli.serving import Seen, Target

LIMITS = ("ttft", "tpot", "e2el")


def serve(
    url: Annotated[
        str | None, typer.Option(help="An OpenAI server, as in http://127.0.0.1:8000, instead of a gateway.")
    ] = None,
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    insecure: Insecure = False,
    keys: Keys = None,
    model: Annotated[str, typer.Option(help="Its name on an OpenAI server.")] = "",
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="For an OpenAI server.")] = None,
    num_prompts: Annotated[int, typer.Option(min=1)] = 100,
    input: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 128,
    output: Annotated[int, typer.Option(min=1, help="Tokens of each completion.")] = 128,
    trace: Annotated[
        Path | None, typer.Option(help="Lengths and moments of its first requests: an Azure csv or a Mooncake jsonl.")
    ] = None,
    max_length: Annotated[int, typer.Option(min=2, help="Of the trace's longest request; all are scaled alike.")] = 512,
    speed: Annotated[float, typer.Option(help="How many times as fast as it happened a trace is replayed.")] = 1.0,
    request_rate: Annotated[float, typer.Option(help="Requests per second; inf is all at once.")] = inf,
    burstiness: Annotated[float, typer.Option(help="1: a Poisson process; less: in bursts; more: steadily.")] = 1.0,
    max_concurrency: Annotated[int | None, typer.Option(min=1, help="Requests that run at the same time.")] = None,
    goodput: Annotated[
        list[str] | None, typer.Option(metavar="ttft|tpot|e2el:MS", help="A limit; may be repeated.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of prompts and moments.")] = 0,
    save_result: Annotated[Path | None, typer.Option(metavar="FILE", help="vLLM's fields, as JSON.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")] = False,
) -> None:
    """Measure a server that runs, from the outside: time to first token, between tokens, throughput, goodput."""
    from pannier.cli.serving_result import report_of, vllm_fields

    if request_rate <= 0 or burstiness <= 0 or speed <= 0:
        raise typer.BadParameter("--request-rate, --burstiness and --speed must be above 0")
    limits = dict(_limit(each) for each in goodput or ())
    if trace is None:
        load, arrivals = Load.equal(num_prompts, input, output), at_rate(num_prompts, request_rate, burstiness, seed)
    else:
        from pannier.planner.trace import read_trace

        load = Load.of_trace(trace, num_prompts, max_length)
        moments = [each.arrival_s for each in islice(read_trace(trace), num_prompts)]
        arrivals = at_speed(moments, speed)

    async def measure() -> "tuple[list[Seen], float]":
        from pannier.cli.serving import serve_all

        async with _target(url, endpoint, insecure, keys, model, api_key) as target:
            asks = load.asks(seed, await target.vocab_size())
            return await serve_all(target, asks, arrivals, max_concurrency)

    seen, total_s = asyncio.run(measure())
    settings = {
        "backend": "pannier" if url is None else "openai",
        "label": None,
        "model_id": model or None,
        "request_rate": "inf" if request_rate == inf else request_rate,
        "burstiness": burstiness,
        "max_concurrency": max_concurrency,
    }
    fields = vllm_fields(seen, total_s, limits, settings)
    if save_result is not None:
        save_result.write_text(json.dumps(fields))
    report = report_of(load.name, url or endpoint, fields)
    report.print()
    first_error = next((each.error for each in seen if each.error), None)
    if first_error is not None:
        print(f"{fields['failed']} requests failed, the first one with: {first_error}")
    if as_json:
        print(report.to_json())
    if first_error is not None:
        raise typer.Exit(1)


@asynccontextmanager
async def _target(
    url: str | None, endpoint: str, insecure: bool, keys: Path | None, model: str, api_key: str | None
) -> "AsyncIterator[Target]":
    from pannier.cli.serving import TIMEOUT_S, HttpTarget, ZmqTarget
    from pannier.client import AsyncClient

    if url is None:
        async with AsyncClient(endpoint, insecure=insecure, keys=keys) as client:
            yield ZmqTarget(client)
        return
    import httpx

    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=TIMEOUT_S, limits=limits) as http:
        name = model or (await http.get("/v1/models")).json()["data"][0]["id"]
        yield HttpTarget(http, name)


def _limit(given: str) -> tuple[str, float]:
    name, _, limit = given.partition(":")
    try:
        if name in LIMITS and float(limit) > 0:
            return name, float(limit)
    except ValueError:
        pass
    raise typer.BadParameter(f"{given!r} is not one of {', '.join(LIMITS)} with milliseconds, as in ttft:200")
