"""`pannier simulate` as a person and a program see it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pannier.cli.__main__ import app
from pannier.runtime.errors import ConfigError
from tests.planner.traces import write_azure

runner = CliRunner()


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Twenty requests, one a second."""
    return write_azure(tmp_path / "small.csv", *(f"2023-11-16 18:15:{10 + number},300,5" for number in range(20)))


def figures(*arguments: str) -> dict[str, float]:
    done = runner.invoke(app, ["simulate", "--json", *arguments])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["command"] == "simulate"
    return {row["metric"]: row["value"] for row in found["rows"]}


def test_every_figure_is_a_row_of_the_long_form(trace: Path) -> None:
    """So that any program that reads one measuring command reads this one."""
    found = figures("--trace", str(trace))
    assert found["requests"] == 20
    assert found["seconds"] >= 19
    assert {"ttft_s_p99", "tpot_s_mean", "queueing_s_p50", "batch_p90", "hit_rate", "preemptions"} <= found.keys()


def test_a_person_gets_a_table(trace: Path) -> None:
    """Words and units rather than names of fields."""
    done = runner.invoke(app, ["simulate", "--trace", str(trace)])
    assert done.exit_code == 0, done.output
    assert "output tokens a second" in done.stdout
    assert "ttft" in done.stdout


def test_the_options_reach_the_simulation(trace: Path) -> None:
    """Fewer or more requests, one at a time, at another rate: the same seed gives the same figures."""
    path = str(trace)
    assert figures("--trace", path, "--limit", "5", "--repeat", "3")["requests"] == 15
    assert figures("--trace", path, "--one-at-a-time")["peak_running"] == 1
    fast = figures("--trace", path, "--rate", "100", "--seed", "3")
    assert fast["seconds"] < 19
    assert fast == figures("--trace", path, "--rate", "100", "--seed", "3")
    refused = figures("--trace", path, "--rate", "1000", "--max-sequences", "1", "--max-waiting", "1")
    assert refused["requests"] + refused["refused_overloaded"] == 20


PLANNED = ("plan", "--compute", "p5.48xlarge", "--attention", "g6e.48xlarge", "--model", "LLaMA3-70B")


def test_a_saved_plan_is_the_clock(trace: Path, tmp_path: Path) -> None:
    """Its groups, replicas and lanes; what an option says wins; with many at a time nobody is slower than planned."""
    plan, path = tmp_path / "plan.json", str(trace)
    done = runner.invoke(app, [*PLANNED, "--save", str(plan), "--json"], catch_exceptions=False)
    planned = json.loads(done.stdout.splitlines()[-1])
    tpot_ms = next(r["value"] for r in planned["rows"] if (r["engine"], r["metric"]) == ("offloaded", "tpot"))
    found = figures("--trace", path, "--plan", str(plan))
    assert found["blocks"] == sum(json.loads(plan.read_text())["blocks"])
    assert found["tpot_s_mean"] <= tpot_ms / 1e3
    assert figures("--trace", path, "--plan", str(plan), "--blocks", "50", "--groups", "2")["blocks"] == 100
    with pytest.raises(ConfigError, match="blocks are of 64 tokens"):
        runner.invoke(
            app, ["simulate", "--trace", path, "--plan", str(plan), "--block-size", "16"], catch_exceptions=False
        )
    plan.write_text("{}")
    with pytest.raises(ConfigError, match="is no plan"):
        runner.invoke(app, ["simulate", "--trace", path, "--plan", str(plan)], catch_exceptions=False)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(["--rate", "0"], "rate is 0"), (["--max-batch-tokens", "4"], "max_batch_tokens is 4")],
)
def test_options_that_cannot_work_are_refused_by_name(arguments: list[str], says: str, trace: Path) -> None:
    """One sentence, as from every command."""
    with pytest.raises(ConfigError, match=says):
        runner.invoke(app, ["simulate", "--trace", str(trace), *arguments], catch_exceptions=False)
