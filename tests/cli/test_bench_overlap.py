"""`pannier bench overlap`: windows, verdicts and pictures; and the command over real processes that only wait."""

import json
import xml.etree.ElementTree
from pathlib import Path

import pytest

from pannier.cli.overlap_report import overlap_report
from pannier.cli.overlap_run import Run, Window
from pannier.cli.overlap_verdict import verdict
from pannier.cli.timeline_plot import Bar, Line, check_plot, lines, write_plot
from pannier.compute.step_clock import Span
from pannier.compute.timeline import Timeline
from pannier.planner.overlap import Parts
from pannier.runtime.errors import ConfigError
from tests.cli.terminal import Terminal

SECONDS = {
    "compute_s": 40.0,
    "attention_s": 8.0,
    "transfer_s": 32.0,
    "exposed_attention_s": 1.0,
    "exposed_transfer_s": 3.0,
    "total_s": 90.0,
}


def window(**compute_s: float) -> Window:
    """Fifty seconds in which 100 lane-steps had 4 rows each."""
    return Window(10.0, 60.0, 8, 400, 100, SECONDS, compute_s)


def test_a_lane_step_is_counted_per_replica() -> None:
    """Two replicas do two at a time. The least busy device is the one that is told."""
    assert window(a=40.0).lane_step_s == 0.5
    assert window(a=40.0).compute_busy == 0.8
    both = window(a=25.0, b=15.0)
    assert (both.lane_step_s, both.compute_busy, both.attention_busy) == (1.0, 0.3, 0.16)
    assert both.parts == Parts(0.4, 0.08, 0.32)


@pytest.mark.parametrize(
    ("transfer_ms", "offloaded", "monolithic", "said"),
    [
        (20, 200.0, 100.0, "pays: 2.00 times the tokens/s of monolithic; a lane-step can't take less than 40 ms"),
        (400, 40.0, 160.0, "transfer takes 400 ms, and would have to take less than 52 ms"),
        (400, 40.0, 400.0, "no link would make it pay"),
        (10, 90.0, 160.0, "what is lost is neither compute, attention nor transfer"),
    ],
)
def test_the_verdict_says_what_decides(transfer_ms: float, offloaded: float, monolithic: float, said: str) -> None:
    """8 rows a lane-step, 40 ms of compute and 8 ms of attention."""
    sentence = verdict(Parts(0.040, 0.008, transfer_ms / 1e3), 2, 8, offloaded, monolithic)
    assert said in sentence
    assert sentence.startswith("pays") == (offloaded > monolithic)


def test_a_report_without_a_window_says_so() -> None:
    """Where not all requests ran at once there is nothing to take apart; their speed is still known."""
    report = overlap_report("case", {"2 lanes": [Run(64, 2.0, None)], "monolithic": [Run(64, 1.0, None)]}, {})
    assert [(row.engine, row.metric, row.value) for row in report.rows] == [
        ("2 lanes", "run_tokens_per_s", 32.0),
        ("monolithic", "run_tokens_per_s", 64.0),
    ]
    assert "longer --output" in report.settings["verdict"]["offloading"]


@pytest.fixture
def drawn(tmp_path: Path) -> list[Line]:
    """What a worker wrote of two lanes, cut to the seconds 10 to 13."""
    timeline = Timeline()
    for span in (
        Span("compute", 0, 6, 0, 8.0, 9.0),
        Span("compute", 0, 7, 0, 9.5, 10.5),
        Span("attention", 0, 7, 0, 10.5, 11.0),
        Span("compute", 1, 8, 3, 11.0, 14.0),
    ):
        timeline.record(span)
    timeline.write(tmp_path / "compute-0.json", "compute-0")
    return lines("2 lanes", tmp_path, 10.0, 13.0)


def test_lines_of_a_timeline(drawn: list[Line]) -> None:
    """Each lane, the device that they share, and attention; cut at both ends."""
    assert [line.name for line in drawn] == [
        "compute-0 lane 0", "compute-0 lane 1", "compute-0 device", "attention",
    ]  # fmt: skip
    first, second, device, attention = (line.bars for line in drawn)
    assert first == [Bar("compute", 0.0, 0.5, 7, 0), Bar("attention", 0.5, 1.0, 7, 0)]
    assert second == [Bar("compute", 1.0, 3.0, 8, 3)]
    assert device == [first[0], second[0]]
    assert attention == [first[1]]


def test_a_picture_has_a_bar_for_each_span(drawn: list[Line], tmp_path: Path) -> None:
    file = tmp_path / "lanes.svg"
    write_plot(file, drawn)
    titles = [each.text or "" for each in xml.etree.ElementTree.parse(file).iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == sum(len(line.bars) for line in drawn)
    assert "compute, step 7, call 0, 500.000 ms" in titles


def test_a_trace_has_an_event_for_each_span(drawn: list[Line], tmp_path: Path) -> None:
    """In microseconds, on threads that have names."""
    file = tmp_path / "lanes.json"
    write_plot(file, drawn)
    events = json.loads(file.read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == sum(len(line.bars) for line in drawn)
    assert {event["args"]["name"] for event in events if event["name"] == "thread_name"} == {
        line.name for line in drawn
    }
    assert next((event["ts"], event["dur"]) for event in events if event["ph"] == "X") == (0.0, 0.5e6)


def test_a_plot_that_cannot_be_drawn_is_refused_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match=r"--plot is lanes.gif; it must end with .svg, .json, .png"):
        check_plot(Path("lanes.gif"))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_lanes_on_devices_that_only_wait(terminal: Terminal, tiny_model: Path, tmp_path: Path) -> None:
    """No lane-step comes sooner than its bound, the figures are marked, and the lanes are drawn."""
    plot = tmp_path / "lanes.json"
    ran = terminal.call(
        *("bench", "overlap", "--model", str(tiny_model), "--requests", "2", "--output", "16", "--repeats", "1"),
        *("--emulate-compute", "30", "--emulate-attention", "6", "--emulate-delay", "5"),
        *("--plot", str(plot), "--dtype", "float32", "--json"),
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    value = {(row["engine"], row["metric"]): row["value"] for row in found["rows"]}
    assert value["2 lanes", "compute"] >= 29
    assert value["2 lanes", "attention"] >= 6
    assert value["1 lane", "transfer"] >= 2 * 2 * 5  # two calls; the end's way hides behind the last slice
    assert value["2 lanes", "rows_per_lane_step"] == pytest.approx(2, abs=0.5)
    for engine in ("1 lane", "2 lanes"):
        assert value[engine, "lane_step"] > 0.9 * max(30, value[engine, "compute"])
    emulated = next(settings for name, settings in found["settings"].items() if "emulated" in name)
    assert emulated == {"compute": "30", "attention": "6", "delay": 5.0}
    assert "monolithic" in found["settings"]["verdict"]["offloading"]
    groups = {e["args"]["name"] for e in json.loads(plot.read_text())["traceEvents"] if e["name"] == "process_name"}
    assert groups == {"1 lane", "2 lanes"}
    assert terminal.left() == []
