"""`pannier bench device`: every part measured once, and a profile that plans and predictions take."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from pannier.cli.__main__ import app
from pannier.cli.device_probe import Probe
from pannier.planner.profile import read_profile
from pannier.planner.sizes import CallSize

runner = CliRunner()


def test_a_probe_times_what_it_is_given() -> None:
    """Rates are of bytes and products; more rows take more arithmetic, longer contexts more time."""
    probe = Probe(torch.device("cpu"), 0.01)
    assert probe.read() > 1e8
    call = CallSize(4, 2, 64, 64)
    short, long = (probe.attention(call, "bfloat16", 2, context) for context in (64, 8192))
    assert 0 < short < long


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_profile_is_written_and_read(tmp_path: Path) -> None:
    """Products by dtype, rows and threads; reads, casts, attention and links; no model unless one is asked for."""
    path = tmp_path / "profile.json"
    done = runner.invoke(app, ["bench", "device", "--seconds", "0.01", "--save", str(path), "--json"])
    assert done.exit_code == 0, done.output
    profile = read_profile(path)
    assert {each.dtype for each in profile.gemms} >= {"float32"}
    assert {each.rows for each in profile.gemms} == {1, 4, 16, 64, 256}
    assert profile.read_bytes_per_s > 1e8
    assert profile.cast_bytes_per_s["bfloat16-float32"] > 0
    assert {each.kind for each in profile.links} >= {"plain tcp", "zmq tcp"}
    assert (profile.slices, profile.attention, profile.engine) == ([], [], [])
    metrics = {row["metric"] for row in json.loads(done.stdout.splitlines()[-1])["rows"]}
    assert {"read_stream", "attention_share", "gemm_64_rows", "round_trip_4K"} <= metrics
