"""`pannier plan` as a person, a program and a browser see it."""

import json
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pannier.cli.__main__ import app
from pannier.cli.charts import Series, bar_chart, line_chart
from pannier.cli.plan_inputs import shape_sizes
from pannier.runtime.errors import ConfigError, ModelError
from pannier.runtime.random_models import SHAPES
from tests.planner.traces import write_azure

runner = CliRunner()
PAIR = ("--compute", "g6.xlarge", "--attention", "g5g.xlarge")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def run(*arguments: str) -> str:
    done = runner.invoke(app, ["plan", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def report(*arguments: str) -> dict[str, dict[str, float]]:
    """Engine -> metric -> value."""
    found = json.loads(run("--json", *arguments).splitlines()[-1])
    assert found["command"] == "plan"
    engines: dict[str, dict[str, float]] = {}
    for row in found["rows"]:
        engines.setdefault(row["engine"], {})[row["metric"]] = row["value"]
    return engines | {"settings": found["settings"]}


def test_a_person_reads_the_verdict_its_reasons_and_what_the_names_mean() -> None:
    said = run(*PAIR)
    assert "do not disaggregate" in said
    assert "batch " in said
    assert "M/(M+N)" in said
    assert "G5g is a T4G (Turing: no bfloat16) on a Graviton2" in said
    assert "G6 is an L4" in said
    assert "T4G would have to convert bfloat16" in said
    assert "us-east-1, 2026-07-20" in said
    assert "links of PCIe 4.0 x16" in said


def test_a_program_reads_the_long_form() -> None:
    found = report(*PAIR)
    offloaded, homogeneous = found["offloaded"], found["homogeneous"]
    assert {"tokens_per_s", "usd_per_mtok", "tpot", "ttft", "compute", "attention", "transfer"} <= offloaded.keys()
    for each in (offloaded, homogeneous):
        assert each["usd_per_mtok"] == pytest.approx(each["usd_per_hour"] / 3.6e-3 / each["tokens_per_s"])


def test_pools_of_given_sizes_are_taken_as_they_are() -> None:
    settings = report("--compute", "2xg6.xlarge", "--attention", "3xg5g.xlarge")["settings"]
    division = settings["offloaded"]
    assert isinstance(division, dict)
    assert (division["compute devices"], division["attention devices"], division["heads"]) == (2, 3, "3+3+2")


def test_options_change_what_they_name() -> None:
    """A goal is kept; flows and a faster link help; without prompts a device has more time."""
    plain = report(*PAIR)["offloaded"]
    assert report(*PAIR, "--tpot", "400")["offloaded"]["tpot"] <= 400 < plain["tpot"]
    assert report(*PAIR, "--link-gbps", "100")["offloaded"]["tokens_per_s"] > plain["tokens_per_s"]
    assert report(*PAIR, "--no-prefill")["offloaded"]["tokens_per_s"] > plain["tokens_per_s"]
    assert report(*PAIR, "--shares", "1,1,1,0.9")["homogeneous"]["tpot"] != report(*PAIR)["homogeneous"]["tpot"]


def test_a_model_is_numbers_or_a_configuration_or_one_of_the_paper(tiny_model: Path) -> None:
    """The configuration alone: weights aren't looked at."""
    (tiny_model.parent / "bare").mkdir(exist_ok=True)
    bare = shutil.copy(tiny_model / "config.json", tiny_model.parent / "bare" / "config.json").parent  # type: ignore[union-attr]
    assert report("--model", str(bare), *PAIR)["offloaded"]["tokens_per_s"] > 0
    numbers = report("--model", "weights_gb=137.5,layers=80,width=8192,queries_per_kv=8", *BIG)
    assert numbers["offloaded"] == report("--model", "LLaMA3-70B", *BIG)["offloaded"]


BIG = ("--compute", "p5.48xlarge", "--attention", "p4de.24xlarge", "--no-prefill")


def test_sizes_of_the_random_shapes_are_those_of_their_names() -> None:
    millions = {name: shape_sizes(name, shape).parameters / 1e6 for name, shape in SHAPES.items()}
    assert millions["llama-135m"] == pytest.approx(134.5, abs=0.1)
    assert millions["llama-1b"] == pytest.approx(1235.8, abs=0.1)
    assert millions["llama-8b"] == pytest.approx(8030.3, abs=0.1)


def test_lengths_come_from_a_trace(tmp_path: Path) -> None:
    trace = write_azure(tmp_path / "t.csv", *(f"2023-11-16 18:15:1{n},1155,211" for n in range(5)))
    assert report("--trace", str(trace), *PAIR)["offloaded"] == report(*PAIR)["offloaded"]


def test_without_pools_all_pairs_are_searched() -> None:
    said = run("--model", "LLaMA3-70B", "--no-prefill", "--tpot", "60")
    assert "pairs of" in said
    assert "disaggregate" in said


@pytest.mark.slow
def test_known_pairs_are_judged_in_one_table() -> None:
    said = run("--pairs", "--json")
    assert said.count("pays: held by") + said.count("not pay: ") >= 20
    assert "DDR5-4800 x12" in said
    assert "card:H100" in said
    assert json.loads(said.splitlines()[-1])["command"] == "plan --pairs"


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        (["--compute", "g6.xlarge"], ConfigError, "give both"),
        (["--compute", "g9.huge", "--attention", "g6.xlarge"], ConfigError, "no instance 'g9.huge'"),
        (["--compute", "g7e.2xlarge", "--attention", "g6.xlarge"], ConfigError, "isn't established"),
        (["--compute", "g6f.large", "--attention", "g6.xlarge"], ConfigError, "part of an L4"),
        ([*PAIR, "--objective", "speed"], ConfigError, "objective is 'speed'"),
        ([*PAIR, "--objective", "throughput"], ConfigError, "--budget"),
        ([*PAIR, "--shares", "2"], ConfigError, "above 0 and at most 1"),
        ([*PAIR, "--model", "nowhere"], ModelError, "no folder with a config.json"),
        ([*PAIR, "--model", "layers=3"], ModelError, "lacks weights_gb, width"),
        ([*PAIR, "--dtype", "int4"], ConfigError, "dtype is 'int4'"),
    ],
)
def test_what_cannot_be_planned_is_said_in_one_sentence(
    arguments: list[str], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        run(*arguments)


def test_charts_are_well_formed_and_show_every_point() -> None:
    """Whatever the names have in them; a logarithmic axis leaves out what it can't show."""
    drawn = line_chart("<a> & b", "x", "y", [Series("<s>", [(1, 10), (100, 0), (1000, 3)])], log_x=True, log_y=True)
    assert len(ElementTree.fromstring(drawn).findall(".//{*}circle")) == 2
    bars = ElementTree.fromstring(bar_chart("t", "ms", {"one": {"a": 1.0, "b": 2.0}, "two": {"a": 0.0}}))
    assert [bar for bar in bars.iter("{http://www.w3.org/2000/svg}rect") if bar.find("{*}title") is not None]


def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    """No script, no address to be fetched; four plots."""
    page = tmp_path / "plan.html"
    run(*PAIR, "--html", str(page))
    text = page.read_text()
    assert text.count("<svg") == 4
    for name in ("Throughput and cost", "Roofline", "Where a step", "Smallest bandwidth"):
        assert name in text
    assert "<script" not in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed, so the page isn't opened in a browser")
def test_a_browser_shows_the_page(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    run(*PAIR, "--html", str(page))
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile"]
    shown = subprocess.run(
        [*command, "--dump-dom", page.as_uri()], check=True, capture_output=True, text=True, timeout=50
    ).stdout
    assert shown.count("<svg") == 4
    assert "do not disaggregate" in shown
