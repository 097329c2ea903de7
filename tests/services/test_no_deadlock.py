"""Full queues in both directions, and everybody goes on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("link", ["zmq", "tcp"])
def test_no_deadlock(link: str) -> None:
    """Prefill floods both ways through queues of 1 and buffers far smaller than a frame: every planned step completes.

    With sends that block, the same flood stands still after a step or two in each lane.
    """
    roots = os.pathsep.join(str(ROOT / folder) for folder in ("services", "common", "kernels"))
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "bench_deadlock.py"), "--seconds", "2", "--link", link, "--json"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": roots},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = {row["metric"]: row["value"] for row in json.loads(done.stdout.splitlines()[-1])["rows"]}
    assert figures["fewest_steps_of_a_lane"] >= 2
