#!/usr/bin/env python
"""guidellm, a load generator for OpenAI servers, against our HTTP front: does it finish, and is its report sane?

    scripts/bench guidellm [--requests 64] [--streams 8] [--json]

The embedded model, prompts and outputs of fixed lengths. Sane is: every request succeeded, the tokens are those that
were asked for and that our own metrics counted, and its rates and times fit each other. The first time guidellm is
installed into an environment of its own. Exit status 1 if the report isn't.
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parent.parent))
from scripts.own_environment import python_with, without_network

from pannier.http import service as http_service
from pannier.runtime.config import HttpConfig
from tests.e2e.stack import running_stack
from tests.http.conftest import EMBEDDED, url_in

REQUIREMENT = "guidellm==0.8.1"
INPUT, OUTPUT = 64, 32
SLACK = 1.25
"""Between figures that say nearly the same."""
LIMIT_S = 300


def main() -> int:
    """Serve, have it measured, and look at what it says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--streams", type=int, default=8, help="at once")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    options = parser.parse_args()
    python = python_with("guidellm", REQUIREMENT, ours=("torch", "transformers"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with running_stack(folder / "run", EMBEDDED, compute={"dtype": "float32"}) as (stack, _):
            stack.start(http_service.run, "http", HttpConfig(gateway=stack.endpoint, port=0))
            url = url_in(folder / "run" / "http.log")
            report = measure(python, url, folder, options.requests, options.streams)
            counted = counters(httpx.get(f"{url}/metrics", timeout=30).text)
    (benchmark,) = report["benchmarks"]
    figures = figures_of(benchmark)
    for name, value in figures.items():
        print(f"{name:>40}  {value:.2f}")
    wrong = list(mistakes(benchmark, figures, counted, options.requests, options.streams))
    print("\n".join(wrong) or "the report is sane")
    if options.json:
        rows = [
            {"case": f"{options.streams} streams", "engine": "http", "metric": metric, "value": value, "unit": ""}
            for metric, value in figures.items()
        ]
        print(json.dumps({"command": sys.argv, "machine": platform.machine(), "versions": {}, "rows": rows}))
    return int(bool(wrong))


def measure(python: Path, url: str, folder: Path, requests: int, streams: int) -> dict[str, Any]:
    """Its report."""
    out = folder / "report.json"
    backend = f"kind=openai_http,target={url},model=embedded,request_format=/v1/completions"
    what = ["--backend", backend, "--profile", f"kind=concurrent,streams={streams}"]
    how = ["--constraint", f"kind=max_requests,count={requests}", "--tokenizer", f"kind=hf_auto,model={EMBEDDED}"]
    data = ["--data", f"kind=synthetic_text,prompt_tokens={INPUT},output_tokens={OUTPUT}"]
    ends = ["--output", f"kind=json,path={out}", "--disable-console-interactive"]
    command = [str(python.parent / "guidellm"), "run", *what, *how, *data, *ends]
    subprocess.run(command, check=True, cwd=folder, env=without_network(), timeout=LIMIT_S, stdout=sys.stderr)
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def figures_of(benchmark: dict[str, Any]) -> dict[str, float]:
    """Means over the requests that succeeded."""
    metrics = benchmark["metrics"]
    names = (
        "requests_per_second", "output_tokens_per_second", "prompt_token_count", "output_token_count",
        "request_latency", "time_to_first_token_ms", "inter_token_latency_ms",
    )  # fmt: skip
    return {name: float(metrics[name]["successful"]["mean"]) for name in names}


def counters(text: str) -> dict[str, float]:
    """Sums of what `/metrics` says, by name."""
    sums: dict[str, float] = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            key = name.partition("{")[0]
            sums[key] = sums.get(key, 0.0) + float(value)
    return sums


def mistakes(
    benchmark: dict[str, Any], figures: dict[str, float], counted: dict[str, float], requests: int, streams: int
) -> Iterator[str]:
    """One sentence for each thing that can't be."""
    totals = benchmark["metrics"]["request_totals"]
    if (totals["successful"], totals["errored"]) != (requests, 0):
        yield f"of {requests} requests {totals['successful']} succeeded and {totals['errored']} failed"
    if figures["output_token_count"] != OUTPUT:
        yield f"outputs have {figures['output_token_count']} tokens, not {OUTPUT}"
    generated = counted["vllm:generation_tokens_total"]
    if not requests * OUTPUT <= generated <= requests * OUTPUT * SLACK:  # it tries the server first
        yield f"our metrics have {generated} tokens, not {requests * OUTPUT}"
    latency_s = (figures["time_to_first_token_ms"] + (OUTPUT - 1) * figures["inter_token_latency_ms"]) / 1e3
    if not 1 / SLACK <= latency_s / figures["request_latency"] <= SLACK:
        yield f"first and further tokens take {latency_s:.3f} s together, requests {figures['request_latency']:.3f} s"
    at_once = figures["requests_per_second"] * figures["request_latency"]
    if not at_once <= streams * SLACK:
        yield f"{at_once:.1f} requests ran at once, of {streams} streams"


if __name__ == "__main__":
    sys.exit(main())
