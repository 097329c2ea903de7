#!/usr/bin/env python
"""Many streams at once through the HTTP front: what a token costs there and in the gateway, and what leavers leave.

    scripts/bench http [--streams 200] [--tokens 64] [--json]

The embedded model. First every stream is read to its end: its text must be that of a request of its own. Then as many
are begun again and half of their clients are killed: their blocks must be back within a second, and the others' texts
whole. Exit status 1 if not.
"""

import argparse
import asyncio
import json
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parent.parent))
from pannier.client import Client
from pannier.http import service as http_service
from pannier.runtime.config import HttpConfig
from tests.e2e.stack import Stack, running_stack
from tests.http.conftest import EMBEDDED, url_in

CLOCK_TICKS_PER_S = 100
BACK_S = 1.0


def main() -> int:
    """Serve, measure, and say whether all promises were kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    options = parser.parse_args()
    prompts = [f"In the {number} year" for number in range(options.streams)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        settings = {"max_sequences": options.streams, "max_batch_tokens": max(512, options.streams)}
        with running_stack(folder, EMBEDDED, compute={"dtype": "float32"}, **settings) as (stack, client):
            stack.start(http_service.run, "http", HttpConfig(gateway=stack.endpoint, port=0))
            url = url_in(folder / "http.log")
            expected = {prompt: client.complete(prompt, **asked(options.tokens)).text for prompt in prompts[::20]}
            figures, wrong = asyncio.run(all_read(stack, url, prompts, options.tokens, expected))
            back_s, wrong_again = asyncio.run(half_killed(client, url, prompts, options.tokens, expected))
    figures["seconds until the blocks of killed clients were back"] = back_s
    for what, value in figures.items():
        print(f"{what:>60}  {value:.3f}")
    wrong += wrong_again
    print(f"{wrong} texts are not those of requests alone")
    if options.json:
        rows = [
            {"case": f"{options.streams} streams", "engine": "offloaded", "metric": metric, "value": value, "unit": ""}
            for metric, value in figures.items()
        ]
        print(json.dumps({"command": sys.argv, "machine": platform.machine(), "versions": {}, "rows": rows}))
    return int(wrong > 0 or back_s > BACK_S)


def asked(tokens: int) -> dict[str, Any]:
    """Greedy, and as many tokens as asked for."""
    return {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True}


async def all_read(
    stack: Stack, url: str, prompts: list[str], tokens: int, expected: dict[str, str]
) -> tuple[dict[str, float], int]:
    """Read all streams to their end; figures, and how many texts are wrong."""
    before = {name: cpu_seconds(stack, name) for name in ("http", "gateway")}
    started = time.perf_counter()
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=httpx.Limits(max_connections=None)) as client:
        texts = await asyncio.gather(*[read(client, prompt, tokens) for prompt in prompts])
    took_s = time.perf_counter() - started
    total = len(prompts) * tokens
    figures = {"tokens per second": total / took_s}
    for name, seconds in before.items():
        figures[f"us of the {name} process per token"] = 1e6 * (cpu_seconds(stack, name) - seconds) / total
    found = dict(zip(prompts, texts, strict=True))
    return figures, sum(found[prompt] != text for prompt, text in expected.items())


async def half_killed(
    client: Client, url: str, prompts: list[str], tokens: int, expected: dict[str, str]
) -> tuple[float, int]:
    """Begin all streams, and leave every other one in the middle; seconds until only the others' blocks are used."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as staying:
        leaving = httpx.AsyncClient(base_url=url, timeout=600, limits=limits)
        others = [asyncio.create_task(read(leaving, prompt, 10 * tokens)) for prompt in prompts[1::2]]
        stayers = [asyncio.create_task(read(staying, prompt, tokens)) for prompt in prompts[::2]]
        await asyncio.gather(*stayers)
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await leaving.aclose()
        started = time.perf_counter()
        while any(group["used"] for group in (await asyncio.to_thread(client.status))["groups"].values()):  # noqa: ASYNC110  # another process
            await asyncio.sleep(0.01)
        back_s = time.perf_counter() - started
    found = {prompt: task.result() for prompt, task in zip(prompts[::2], stayers, strict=True)}
    return back_s, sum(found[prompt] != text for prompt, text in expected.items() if prompt in found)


async def read(client: httpx.AsyncClient, prompt: str, tokens: int) -> str:
    """One stream as text."""
    text = ""
    body = {"prompt": prompt, "stream": True, **asked(tokens)}
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
    return text


def cpu_seconds(stack: Stack, name: str) -> float:
    """Of a process so far."""
    fields = Path(f"/proc/{stack.processes[name].pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS_PER_S


if __name__ == "__main__":
    sys.exit(main())
