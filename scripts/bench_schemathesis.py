#!/usr/bin/env python
"""Random requests made from the OpenAPI description: does one get a 500, or no answer?

    scripts/bench schemathesis [--cases 2000] [--seconds 900] [--seed 1] [--json]

schemathesis makes legal and illegal bodies for every route of an HTTP front with the embedded model, whose window is
short here. The first time it is installed into an environment of its own. Exit status 1 if an answer says that the
server has a defect, or none comes; or if another request isn't served any more afterwards.
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parent.parent))
from scripts.own_environment import python_with, without_network

from pannier.http import service as http_service
from pannier.runtime.config import HttpConfig
from tests.e2e.stack import running_stack
from tests.http.conftest import EMBEDDED, url_in

REQUIREMENT = "schemathesis==4.32.5"
WINDOW = 48
"""Tokens: legal requests may ask for as many as fit, several times over."""
ANSWER_S = 30
POSTS = 4
"""Routes that take a body; the others have one case each."""


def main() -> int:
    """Serve, ask, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2000, help="at least; of all routes together")
    parser.add_argument("--seconds", type=int, default=900, help="at most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    options = parser.parse_args()
    python = python_with("schemathesis", REQUIREMENT)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        compute = {"dtype": "float32"}
        with running_stack(folder / "run", EMBEDDED, compute=compute, max_model_len=WINDOW) as (stack, client):
            stack.start(http_service.run, "http", HttpConfig(gateway=stack.endpoint, port=0))
            url = url_in(folder / "run" / "http.log")
            started = time.perf_counter()
            code, events = fuzz(python, url, folder, options.cases // POSTS, options.seconds, options.seed)
            took_s = time.perf_counter() - started
            served = httpx.post(f"{url}/v1/completions", json={"prompt": "In the", "max_tokens": 4}, timeout=ANSWER_S)
            used = sum(group["used"] for group in client.status()["groups"].values())
    statuses = statuses_of(events)
    print(f"{sum(statuses.values())} cases in {took_s:.0f} s; answers by status: {dict(sorted(statuses.items()))}")
    print(
        f"schemathesis ended with {code}; afterwards a completion gets {served.status_code}, {used} blocks are in use"
    )
    if options.json:
        rows = [{"case": "cases", "engine": "http", "metric": "answers", "value": sum(statuses.values()), "unit": ""}]
        print(json.dumps({"command": sys.argv, "machine": platform.machine(), "versions": {}, "rows": rows}))
    return int(code != 0 or served.status_code != 200 or used > 0 or any(status >= 500 for status in statuses))


def fuzz(python: Path, url: str, folder: Path, examples: int, seconds: int, seed: int) -> tuple[int, list[Any]]:
    """Exit status of schemathesis, and the events that it has written."""
    report = folder / "events.ndjson"
    command = [str(python.parent / "schemathesis"), "run", f"{url}/openapi.json", "--url", url]
    what = ["--checks", "not_a_server_error", "--phases", "examples,coverage,fuzzing", "--max-examples", str(examples)]
    how = ["--request-timeout", str(ANSWER_S), "--seed", str(seed), "--continue-on-failure", "--workers", "2"]
    out = ["--report", "ndjson", "--report-ndjson-path", str(report), "--suppress-health-check", "all"]
    ended = subprocess.run(
        [*command, *what, *how, *out],
        cwd=folder,
        env=without_network(),
        timeout=seconds,
        stdout=sys.stderr,
        check=False,
    )
    return ended.returncode, [json.loads(line) for line in report.read_text().splitlines()]


def statuses_of(events: Any) -> Counter[int]:
    """How often each status was answered, wherever in the report a response is."""
    found: Counter[int] = Counter()
    if isinstance(events, dict):
        if isinstance(events.get("status_code"), int):
            found[events["status_code"]] += 1
        events = list(events.values())
    if isinstance(events, list):
        for each in events:
            found += statuses_of(each)
    return found


if __name__ == "__main__":
    sys.exit(main())
