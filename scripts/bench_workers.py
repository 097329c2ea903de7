#!/usr/bin/env python
"""Many workers on one machine: do they start, serve and stop cleanly, and what does the gateway cost per step?

    scripts/bench workers [--compute 8] [--attention 24] [--requests 64] [--json]

A small random model in fp32; as it has three KV heads, every three attention workers are a group, and all compute
workers share all groups. Exit status 1 when a text differs from the one that a single pair of workers gives, when a
worker had nothing to do, or when a process doesn't leave well.
"""

import argparse
import json
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from pannier.client import Client
from tests.e2e.models import VOCAB, save_random_model
from tests.e2e.stack import Stack

PROMPT, MAX_TOKENS = 20, 40
CLOCK_TICKS_PER_S = 100


def main() -> int:
    """Run with one worker of each kind, then with many; compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compute", type=int, default=8)
    parser.add_argument("--attention", type=int, default=24)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    options = parser.parse_args()
    generator = torch.Generator().manual_seed(6)
    prompts: list[list[int]] = torch.randint(3, VOCAB, (options.requests, PROMPT), generator=generator).tolist()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_random_model("llama", folder / "model")
        with serving(folder, "one", 1, 1) as (_, client):
            expected = complete(client, prompts)
        started = time.perf_counter()
        with serving(folder, "many", options.compute, options.attention) as (stack, client):
            ready_s = time.perf_counter() - started
            before = gateway_seconds(stack), steps(client.status())
            texts = complete(client, prompts)
            status = client.status()
            cpu_s, num_steps = gateway_seconds(stack) - before[0], steps(status) - before[1]
    idle = [lane["worker"] for lane in status["lanes"] if not lane["steps"]]
    figures = {"seconds to ready": ready_s, "steps": num_steps, "gateway ms per step": cpu_s / num_steps * 1e3}
    print(f"{options.compute} compute and {options.attention} attention workers in {len(status['groups'])} groups")
    for what, value in figures.items():
        print(f"{what:>20}  {value:.2f}")
    print(
        f"{sum(a != b for a, b in zip(texts, expected, strict=True))} of {len(texts)} texts differ; idle lanes: {idle}"
    )
    if options.json:
        case = f"{options.compute}+{options.attention} workers"
        rows = [{"case": case, "engine": "offloaded", "metric": k, "value": v, "unit": ""} for k, v in figures.items()]
        versions = {"torch": torch.__version__}
        print(json.dumps({"command": sys.argv, "machine": platform.machine(), "versions": versions, "rows": rows}))
    return int(texts != expected or bool(idle))


@contextmanager
def serving(folder: Path, name: str, num_compute: int, num_attention: int) -> Iterator[tuple[Stack, Client]]:
    """A ready stack of so many workers; afterwards every process must have left well."""
    (folder / name).mkdir()
    stack = Stack(folder / name)
    stack.gateway(
        folder / "model", compute_workers=num_compute, attention_workers=num_attention, max_sequences=64, block_size=16
    )
    for number in range(num_compute):
        stack.compute(folder / "model", f"compute-{number}", dtype="float32", cache_dir=folder / "cache")
    for number in range(num_attention):
        stack.attention(f"attention-{number}", memory=4 << 20)
    try:
        with Client(stack.endpoint, connect_timeout_s=120) as client:
            stack.wait_until_ready(client)
            yield stack, client
    finally:
        codes = stack.stop()
    assert set(codes.values()) == {0}, codes
    left = [path.name for path in (folder / name).iterdir() if path.is_socket()]
    assert not left, f"socket files left: {left}"


def complete(client: Client, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    """Greedy continuations, all asked for at once."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        asked = [
            pool.submit(client.complete, prompt, max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
            for prompt in prompts
        ]
        return [each.result().tokens for each in asked]


def gateway_seconds(stack: Stack) -> float:
    """CPU seconds of the gateway so far."""
    fields = Path(f"/proc/{stack.processes['gateway'].pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS_PER_S


def steps(status: dict[str, Any]) -> int:
    """Steps of all lanes so far."""
    return sum(lane["steps"] for lane in status["lanes"])


if __name__ == "__main__":
    sys.exit(main())
