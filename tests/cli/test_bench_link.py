"""`pannier bench link`: what a step sends, and the command as a whole."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pannier.cli.link_cases import Case, Geometry, shown, size_of

ROOT = Path(__file__).parents[2]


def test_a_step_sends_what_the_papers_formula_says() -> None:
    """(2 + 2/G) e d B L, where d is the width of all heads and G are the queries per KV head."""
    geometry = Geometry.of("random:llama-8b")
    assert geometry.step_bytes(rows=128) == (2 + 2 / 4) * 2 * 4096 * 128 * 32
    case = geometry.case("model", rows=128)
    assert geometry.calls * (case.size + case.queries) == geometry.step_bytes(rows=128)


def test_a_folder_is_read_as_well() -> None:
    embedded = Geometry.of("embedded")
    assert embedded.calls > 0
    assert embedded.q_heads % embedded.kv_heads == 0


@pytest.mark.parametrize(("text", "size"), [("512", 512), ("16K", 16 << 10), ("8m", 8 << 20), ("1M", 1 << 20)])
def test_sizes_have_units(text: str, size: int) -> None:
    assert size_of(text) == size
    assert shown(size) == text.upper()
    assert Case.equal(size).queries == size


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_every_link_is_measured_beside_plain_tcp() -> None:
    """As one JSON object, with what a model needs; nothing is left in the way of the next run."""
    roots = os.pathsep.join(str(ROOT / folder) for folder in ("services", "common", "kernels"))
    options = ["--sizes", "4K,256K", "--model", "random:llama-135m", "--rows", "4"]
    options += ["--flows", "2", "--repeats", "1", "--json"]
    ran = subprocess.run(
        [sys.executable, "-m", "pannier.cli", "bench", "link", *options],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": roots},
    )
    assert ran.returncode == 0, ran.stderr
    assert not ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    rows = {(row["case"], row["engine"], row["metric"]): row["value"] for row in found["rows"]}
    engines = {engine for _, engine, _ in rows} - {"needed"}
    assert {"plain tcp", "tcp", "tcp asleep", "tcp x2", "zmq tcp", "zmq tcp x2", "zmq ipc"} <= engines
    for case in ("4K each way", "256K each way", "random:llama-135m, a call of 4 rows"):
        for engine in engines:
            assert rows[case, engine, "round_trip_us"] > 0
            assert rows[case, engine, "one_way_gb_per_s"] > 0
    needed = rows["random:llama-135m, a call of 4 rows", "needed", "tensor_bytes_per_step"]
    assert needed == (2 + 2 / 3) * 2 * 576 * 4 * 30
