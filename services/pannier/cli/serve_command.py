"""The options of `pannier serve`."""

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from pannier.cli.options import DEFAULT_PORT, Keys
from pannier.cli.options_emulate import (
    EmulateAttention,
    EmulateBandwidth,
    EmulateCompute,
    EmulateDelay,
    EmulateRate,
)

if TYPE_CHECKING:
    from pannier.cli.serve import Work
    from pannier.client import AsyncClient

HTTP_PORT = 8000
ONCE_TEMPERATURE = 0.7


def serve(
    model: Annotated[str, typer.Argument(help="A folder, 'embedded', or random:SHAPE.")],
    served_model_name: Annotated[str | None, typer.Option(help="What clients call the model.")] = None,
    compute: Annotated[str, typer.Option(metavar="DEVICE,...", help="One compute worker on each.")] = "cpu",
    stages: Annotated[int, typer.Option(help="Parts of the model, in order, each on a compute worker of its own.")] = 1,
    attention: Annotated[
        str | None, typer.Option(metavar="N|DEVICE,...", help="So many attention workers on the CPU, or one on each.")
    ] = None,
    monolithic: Annotated[bool, typer.Option("--monolithic", help="Attention in the compute processes.")] = False,
    pin: Annotated[bool, typer.Option("--pin", help="Keep each worker to CPU cores of its own.")] = False,
    link: Annotated[
        str | None,
        typer.Option(metavar="auto|shm|tcp|zmq", help="From compute to attention: shared memory, plain TCP or ZeroMQ."),
    ] = None,
    flows: Annotated[
        int | None, typer.Option(help="Connections per link that goes over a network [default: 1].")
    ] = None,
    lanes: Annotated[int | None, typer.Option(help="Micro-batches in flight per compute worker [default: 2].")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.")] = None,
    kv_dtype: Annotated[
        str | None,
        typer.Option(help="Of the KV cache: float32, bfloat16, float16, int8, fp8; auto: the model's, or near it."),
    ] = None,
    dtype_strict: Annotated[
        bool, typer.Option("--dtype-strict", help="Steps that convert weights, K and V or what links carry fail.")
    ] = False,
    heads_split: Annotated[str | None, typer.Option(metavar="N,N,...", help="KV heads per attention worker.")] = None,
    attention_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="For KV blocks, per attention worker, as in 2GiB.")
    ] = None,
    max_batch_tokens: Annotated[int | None, typer.Option(help="Rows of one step [default: 512].")] = None,
    max_sequences: Annotated[int | None, typer.Option(help="Sequences that run at once [default: 64].")] = None,
    max_waiting: Annotated[
        int | None, typer.Option(help="Requests that may wait; more are refused [default: 1024].")
    ] = None,
    policy: Annotated[
        str | None, typer.Option(metavar="fcfs|priority", help="Who goes first: who came first, or who has priority.")
    ] = None,
    prefix_cache: Annotated[
        bool | None, typer.Option("--prefix-cache/--no-prefix-cache", help="Share the KV of prompts that begin alike.")
    ] = None,
    max_model_len: Annotated[
        str | None, typer.Option(metavar="N|4k|4K|auto", help="Tokens of prompt and completion [default: what fits].")
    ] = None,
    block_size: Annotated[int | None, typer.Option(metavar="16|32|64", help="Tokens per KV block.")] = None,
    port: Annotated[
        int, typer.Option(min=1, max=65535, help="Port for clients, on the loopback address.")
    ] = DEFAULT_PORT,
    http_port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the HTTP front, OpenAI's API.")] = HTTP_PORT,
    http_host: Annotated[str | None, typer.Option(help="Its address [default: 127.0.0.1].")] = None,
    no_http: Annotated[bool, typer.Option("--no-http", help="Start no HTTP front.")] = False,
    api_key: Annotated[
        list[str] | None, typer.Option(help="Who sends another is turned away; may be repeated.")
    ] = None,
    endpoint: Annotated[str | None, typer.Option(help="Where clients come in, instead of --port.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Allow --endpoint on other addresses.")] = False,
    keys: Keys = None,
    encrypt: Annotated[
        str | None,
        typer.Option(metavar="all|control|none", help="What keys are for: all, or all but the links of workers."),
    ] = None,
    otlp_endpoint: Annotated[
        str | None, typer.Option(metavar="URL", help="A collector that gets OpenTelemetry traces of requests.")
    ] = None,
    emulate_compute: EmulateCompute = None,
    emulate_attention: EmulateAttention = None,
    emulate_rate: EmulateRate = None,
    emulate_delay: EmulateDelay = None,
    emulate_bandwidth: EmulateBandwidth = None,
    once: Annotated[str | None, typer.Option(metavar="PROMPT", help="Print one completion and leave.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Of the completion of --once.")] = 96,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show every event of every process.")] = False,
) -> None:
    """Start gateway, compute and attention workers on this machine, and stop them together."""
    from pannier.cli.serve import serve as run_stack
    from pannier.cli.stack import ServeOptions

    if endpoint is None and once is None:
        endpoint = f"tcp://127.0.0.1:{port}"
    options = ServeOptions(
        model=model,
        served_model_name=served_model_name,
        compute=compute,
        stages=stages,
        pin=pin,
        attention=attention,
        monolithic=monolithic,
        link=link,
        flows=flows,
        lanes=lanes,
        dtype=dtype,
        kv_dtype=kv_dtype,
        dtype_strict=dtype_strict,
        heads_split=heads_split,
        attention_memory=attention_memory,
        max_batch_tokens=max_batch_tokens,
        max_sequences=max_sequences,
        max_waiting=max_waiting,
        policy=policy,
        prefix_cache=prefix_cache,
        max_model_len=max_model_len,
        block_size=block_size,
        endpoint=endpoint,
        http_port=None if no_http or once is not None else http_port,
        http_host=http_host,
        api_keys=tuple(api_key or ()),
        insecure=insecure,
        keys=keys,
        encrypt=encrypt,
        otlp_endpoint=otlp_endpoint,
        emulate_compute=emulate_compute,
        emulate_attention=emulate_attention,
        emulate_rate=emulate_rate,
        emulate_delay=emulate_delay,
        emulate_bandwidth=emulate_bandwidth,
    )
    work = _forever(model, options.http_port) if once is None else _once(once, max_tokens)
    stopped_by = asyncio.run(run_stack(options, work, verbose=verbose))
    if stopped_by is not None and once is not None:
        raise typer.Exit(128 + stopped_by)


def _forever(model: str, http_port: int | None) -> "Work":
    http = "" if http_port is None else f" and http://127.0.0.1:{http_port}/v1"

    async def announce(_client: "AsyncClient", endpoint: str) -> None:
        print(f"pannier serves {model} at {endpoint}{http}; stop it with Ctrl-C", flush=True)
        await asyncio.Event().wait()

    return announce


def _once(prompt: str, max_tokens: int) -> "Work":
    async def complete(client: "AsyncClient", _endpoint: str) -> None:
        async with client.stream(prompt, max_tokens=max_tokens, temperature=ONCE_TEMPERATURE) as chunks:
            async for chunk in chunks:
                print(chunk.text, end="", flush=True)
        print()

    return complete
