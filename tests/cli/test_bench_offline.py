"""`pannier bench offline`: what is asked for, what is counted, and every engine of it in one run."""

import asyncio
import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from pannier.cli.__main__ import app
from pannier.cli.engines import PEERS, Arrivals, Timing, transformers
from pannier.cli.load import Ask, Lengths, Load, vocab_size
from pannier.cli.report import Report
from pannier.runtime.errors import ConfigError, PannierError
from tests.cli.terminal import Terminal
from tests.planner.traces import write_azure

MIXED = [Ask([11, 12, 13, 14, 15], 3), Ask([16], 7), Ask([17, 18] * 20, 1)]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Three requests: one of 400 tokens, half and an eighth of it."""
    lines = ("300,100", "150,50", "49,1")
    return write_azure(tmp_path / "mixed.csv", *(f"2023-11-16 18:15:1{n},{line}" for n, line in enumerate(lines)))


def test_a_trace_is_scaled_by_one_factor(trace: Path) -> None:
    """So that its requests stay as unlike as they were; none loses its last token."""
    assert Load.of_trace(trace, 3, 1000).lengths == ((300, 100), (150, 50), (49, 1))
    load = Load.of_trace(trace, 3, 100)
    assert load.lengths == ((75, 25), (37, 12), (12, 1))
    assert load.name == "mixed 3 requests, 124+38 tokens"
    assert load.shortened(5).lengths == ((75, 5), (37, 5), (12, 1))


def test_a_trace_that_is_too_short_is_refused(trace: Path) -> None:
    with pytest.raises(ConfigError, match="has 3 requests; --requests is 4"):
        Load.of_trace(trace, 4, 100)


def test_prompts_are_of_the_vocabulary_and_new_for_every_repeat() -> None:
    """The same again for the same repeat, or engines would get different ones."""
    load = Load.equal(2, 30, 4)
    assert load.lengths == (Lengths(30, 4),) * 2
    asks = load.asks(0, 20)
    assert [(len(ask.prompt), ask.output) for ask in asks] == [(30, 4)] * 2
    assert {token for ask in asks for token in ask.prompt} == set(range(10, 20))
    assert asks == load.asks(0, 20)
    assert asks != load.asks(1, 20)


def test_the_vocabulary_is_found_without_loading_a_model(tiny_model: Path) -> None:
    assert vocab_size(str(tiny_model)) == 257
    assert vocab_size("random:llama-135m") == 49152


def test_times_are_counted_from_when_tokens_came() -> None:
    """Decode: what came after every request had begun."""
    asks = [Ask([1] * 5, 3), Ask([1], 2)]
    assert Timing.of(asks, [[1.0, 2.0, 3.0], [1.5, 4.0]]) == Timing(4.0, 2.5, 6, 5, 3)


@pytest.mark.parametrize("arrivals", [[[1.0, 2.0], [1.5, 4.0]], [[1.0, 2.0, 3.0], [1.5, 4.0, 5.0]]])
def test_an_engine_with_other_token_counts_is_found_out(arrivals: Arrivals) -> None:
    """Fewer would be faster, and more is not what the ratio says."""
    with pytest.raises(PannierError, match="were asked for"):
        Timing.of([Ask([1], 3), Ask([1], 2)], arrivals)


def test_ratios_are_to_every_engine_that_is_named() -> None:
    report = Report("bench offline")
    for engine, value in (("monolithic", 6.0), ("a", 3.0), ("b", 2.0)):
        report.add("case", engine, "speed", "tokens/s", [value])
    found = {(ratio.of, ratio.to): ratio.value for ratio in report.ratios("a", "b")}
    assert found == {
        ("monolithic", "a"): 2.0,
        ("b", "a"): pytest.approx(2 / 3),
        ("monolithic", "b"): 3.0,
        ("a", "b"): 1.5,
    }


def test_an_unknown_engine_is_refused() -> None:
    ran = CliRunner().invoke(app, ["bench", "offline", "--model", "embedded", "--against", "vllm"])
    assert ran.exit_code == typer.BadParameter.exit_code
    assert "transformers-continuous" in ran.output


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("peer", PEERS)
def test_transformers_gives_what_is_asked_for(peer: str, tiny_model: Path) -> None:
    """Each request its own number of tokens, one after the other; and it says how it was set."""

    async def run() -> tuple[Arrivals, dict[str, object]]:
        async with transformers(peer, str(tiny_model), "float32") as engine:
            await engine.run(MIXED)
            return await engine.run(MIXED), engine.settings

    arrivals, settings = asyncio.run(run())
    timing = Timing.of(MIXED, arrivals)
    assert (timing.prompt_tokens, timing.output_tokens) == (46, 11)
    assert all(times == sorted(times) and times[0] > 0 for times in arrivals)
    assert settings


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_all_engines_run_side_by_side(terminal: Terminal, tiny_model: Path, trace: Path) -> None:
    """On the lengths of a trace, with a ratio of ours to each of theirs, and of two builds of our operators."""
    options = ("--requests", "3", "--trace", str(trace), "--max-length", "60", "--repeats", "1", "--dtype", "float32")
    others = ("--against", "transformers-continuous", "--cpu-isa", "none")
    ran = terminal.call("bench", "offline", "--model", str(tiny_model), *options, *others, "--json")
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    engines = {row["engine"] for row in found["rows"] if row["metric"] == "total_tokens_per_s"}
    assert engines == {"offloaded", "monolithic", "offloaded, none", "monolithic, none", "transformers-continuous"}
    metrics = {row["metric"] for row in found["rows"]}
    assert {"total_tokens_per_s", "output_tokens_per_s"} <= metrics
    assert all(row["value"] > 0 for row in found["rows"])
    ratios = {(ratio["of"], ratio["to"]) for ratio in found["ratios"]}
    assert {("monolithic", other) for other in engines - {"monolithic", "offloaded"}} <= ratios
    assert found["settings"]["offloaded, none"] == {"PANNIER_CPU_ISA": "none"}
    assert "no compiled attention" in ran.stderr
    assert found["settings"]["transformers-continuous"]["attn_implementation"]
    assert "max_batch_tokens" in ran.stdout.splitlines()[-2]
    assert terminal.left() == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_budgets_for_kv_are_compared_with_offloaded(terminal: Terminal, tiny_model: Path) -> None:
    """As many requests run at once as fit, as was predicted before; the verdict of each budget is in words."""
    # A token takes 2 calls x 2 heads x (16 + 16) x 2 bytes: 9 blocks of 64 tokens, and 18. Each takes 8 in the end.
    small, large = "150KB", "300KB"
    ran = terminal.call(
        *("bench", "offline", "--model", str(tiny_model), "--requests", "8", "--input", "200", "--output", "250"),
        *(
            "--kv-budget",
            f"{small},{large}",
            "--attention",
            "2",
            "--attention-memory",
            "8MB",
            "--repeats",
            "1",
            "--json",
        ),
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    value = {(row["engine"], row["metric"]): row["value"] for row in found["rows"]}
    engines = {f"monolithic {small}": 1, f"monolithic {large}": 2, "offloaded": 8}
    for engine, batch in engines.items():
        assert value[engine, "batch"] == value[engine, "predicted_batch"] == batch
        assert value[engine, "decode_tokens_per_s"] > 0
        assert value[engine, "predicted_decode_tokens_per_s"] > 0
    ratios = {(each["metric"], each["of"], each["to"]): each["value"] for each in found["ratios"]}
    assert ratios["batch", "offloaded", f"monolithic {small}"] == 8
    assert set(found["settings"]["verdict"]) == set(engines) - {"offloaded"}
    assert all("times the tokens/s (predicted" in said for said in found["settings"]["verdict"].values())
    assert terminal.left() == []


def test_budgets_are_compared_with_no_other_engine() -> None:
    for other in (("--against", "transformers"), ("--cpu-isa", "none")):
        ran = CliRunner().invoke(app, ["bench", "offline", "--model", "embedded", "--kv-budget", "16MB", *other])
        assert ran.exit_code == typer.BadParameter.exit_code


def test_a_build_of_the_operators_that_is_not_there_is_refused_before_anything_runs() -> None:
    ran = CliRunner().invoke(app, ["bench", "offline", "--model", "embedded", "--cpu-isa", "sse9"])
    assert ran.exit_code == typer.BadParameter.exit_code
    assert "known are" in ran.output


def test_no_repeat_has_the_prompts_of_another_or_of_the_warm_up() -> None:
    """What was computed before is found in the prefix cache, and would be timed as if it were new."""
    load = Load.equal(2, 8, 4)
    prompts = {tuple(ask.prompt) for repeat in (-1, 0, 1, 2) for ask in load.asks(repeat, 3072)}
    assert len(prompts) == 8
    assert load.asks(1, 3072) == load.asks(1, 3072)
