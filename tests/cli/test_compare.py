"""`pannier compare`: any two results, and the study of G5g and G6."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pannier.cli.__main__ import app
from pannier.cli.report import Report
from pannier.cli.study import comparisons, inputs, predictions
from pannier.planner.catalogue import load_catalogue
from pannier.planner.compare import ranking
from pannier.runtime.errors import ConfigError

runner = CliRunner()
CATALOGUE = load_catalogue()


def run(*arguments: str) -> str:
    done = runner.invoke(app, ["compare", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture
def measured(tmp_path: Path) -> tuple[str, str]:
    """Two runs of one command, with something printed before their last lines."""
    paths = []
    for name, speed in (("one", 100.0), ("two", 150.0)):
        report = Report("bench offline")
        for engine in ("offloaded", "monolithic"):
            report.add(
                "tiny 2x3+4", engine, "output_tokens_per_s", "tokens/s", [speed, speed * (engine == "offloaded")]
            )
        path = tmp_path / f"{name}.json"
        path.write_text(f"a table\n{report.to_json()}\n")
        paths.append(str(path))
    return paths[0], paths[1]


def test_the_same_engines_of_two_results_are_compared(measured: tuple[str, str]) -> None:
    """Each with its counterpart; prices from instances or as given."""
    said = run(*measured, "--instance-a", "g5g.xlarge", "--instance-b", "g6.xlarge")
    assert said.count("1.50x") == 2
    assert "G5g is a T4G" in said
    assert "conversions weren't measured" in said
    only = run(*measured, "--engine", "offloaded", "--usd-a", "1", "--usd-b", "9", "--json")
    rows = json.loads(only.splitlines()[-1])["rows"]
    assert {row["engine"] for row in rows} == {"one offloaded", "two offloaded"}
    assert "isn't known of both" in run(*measured)


def test_a_plan_is_a_result_too(tmp_path: Path) -> None:
    """Predicted against predicted: its engines, its costs."""
    for name, instance in (("a", "g6.xlarge"), ("b", "g5.xlarge")):
        plan = ["plan", "--compute", instance, "--attention", instance, "--json"]
        (tmp_path / f"{name}.json").write_text(runner.invoke(app, plan, catch_exceptions=False).stdout)
    said = run(str(tmp_path / "a.json"), str(tmp_path / "b.json"))
    assert "homogeneous" in said
    assert "is cheaper" in said


@pytest.mark.parametrize(("text", "says"), [("", "is no result"), ('{"rows": [{"case": 1}]}', "is no result")])
def test_what_is_no_result_is_refused(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ConfigError, match=says):
        run(str(tmp_path / "x.json"), str(tmp_path / "x.json"))


def test_results_without_anything_in_common_are_refused(measured: tuple[str, str], tmp_path: Path) -> None:
    report = Report("bench")
    for engine in ("x", "y"):
        report.add("else", engine, "tokens_per_s", "tokens/s", [1.0])
    (tmp_path / "else.json").write_text(report.to_json())
    with pytest.raises(ConfigError, match="no engine or case in common"):
        run(measured[0], str(tmp_path / "else.json"))
    with pytest.raises(ConfigError, match="give two files"):
        run()


def test_the_ranking_of_g5g_and_g6_by_cost_turns_when_the_conversions_go() -> None:
    """The port: G6 by far. Without its conversions, and with vLLM, which has none: G5g."""
    port, bound, vllm = comparisons(CATALOGUE, inputs())
    assert (port[0].tokens_per_s, port[1].tokens_per_s, vllm[0].tokens_per_s) == (12.9, 48.4, 32.53)
    assert port[0].conversions == 0.541
    assert ranking(*port) == ("g6.2xlarge", "g5g.2xlarge")
    assert ranking(*port).turns
    assert ranking(*bound).now == "g5g.2xlarge"
    assert ranking(*vllm).now == "g5g.2xlarge"
    costs = [side.usd_per_mtok for side in (*port, *vllm)]
    assert costs == pytest.approx([11.97, 5.61, 4.75, 5.89], abs=0.005)


def test_what_the_names_are_taken_for_is_set_beside() -> None:
    """A10G and L40S, by their memory bandwidth."""
    found = predictions(CATALOGUE, inputs())
    assert [(side.name, round(side.tokens_per_s or 0, 1)) for side in found] == [
        ("g5.2xlarge", 92.2),
        ("g6e.2xlarge", 132.7),
    ]


def test_one_command_runs_the_study(tmp_path: Path) -> None:
    """Names put right, sources named, inputs as published; a page with plots."""
    page = tmp_path / "study.html"
    said = run("--study", "--html", str(page), "--json")
    assert "T4G (Turing: no bfloat16) on a Graviton2" in said
    assert "the ranking turns" in said
    assert "https://github.com/xbill9/gemma4-dev" in said
    assert page.read_text().count("<svg") == 4
    assert json.loads(said.splitlines()[-1])["command"] == "compare --study"
