"""`pannier audit dtype`."""

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from pannier.cli.__main__ import app

QUICK = ["--prompt", "8", "--steps", "2", "--repeats", "1", "--no-graph"]


def _run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["audit", "dtype", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout


def _values(stdout: str) -> dict[tuple[str, str], float]:
    found: dict[str, Any] = json.loads(stdout.splitlines()[-1])
    assert set(found) == {"command", "machine", "versions", "rows", "ratios", "settings"}
    return {(row["case"], row["metric"]): row["value"] for row in found["rows"]}


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_sound_model_passes_in_ci_and_autocast_fails() -> None:
    code, stdout = _run("embedded", *QUICK, "--fail-on", "fix", "--json")
    assert code == 0
    assert "nothing to fix" in stdout
    values = _values(stdout)
    case = "embedded 1x8 decode: model.norm: bfloat16 to float32, explicit, activation-sized"
    assert values[case, "count_per_step"] == 1
    assert values[case, "bytes_per_token"] == 288 * (2 + 4)
    assert 0 < values["embedded 1x8 decode", "conversion_share"] < 1

    code, stdout = _run("embedded", *QUICK, "--dtype", "float32", "--autocast", "bfloat16", "--fail-on", "fix")
    assert code == 1
    assert "fix: store the weights in bfloat16, converted once" in stdout


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_an_instance_is_predicted_without_weights() -> None:
    code, stdout = _run("random:llama-135m", "--target", "g5g.xlarge", "--json")
    assert code == 0
    assert "T4G (g5g.xlarge), predicted" in stdout
    assert "bfloat16 is emulated" in stdout
    assert ("random:llama-135m 1x64 decode: (every product): bfloat16 to float32, emulated, weight-sized",
            "gain_bound") in _values(stdout)  # fmt: skip


def test_what_is_not_legal_is_said() -> None:
    result = CliRunner().invoke(app, ["audit", "dtype", "embedded", "--fail-on", "keep"])
    assert result.exit_code == 2
    assert "fix or fuse" in result.output
