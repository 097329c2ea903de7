"""What `scripts/bench network` makes of its measurements."""

import argparse

import pytest
from scripts.bench_network import Case, Found, report_of, show
from scripts.lab.raw_tcp import RawTcp

from pannier.cli.overlap_run import Run, Window

SECONDS = {
    "compute_s": 1.0,
    "attention_s": 0.5,
    "transfer_s": 0.8,
    "exposed_attention_s": 0.1,
    "exposed_transfer_s": 0.4,
    "total_s": 2.5,
}
CASE = Case(5.0, 200.0, "all")


def _found(is_same: bool | None) -> dict[Case, Found]:
    """100 lane-steps of 4 rows in two seconds; half of what plain TCP gets."""
    one = Run(400, 2.0, Window(10.0, 12.0, 4, 400, 100, SECONDS, {"compute": 1.0}))
    runs = {"1 lane": [one], "2 lanes": [one], "monolithic": [Run(400, 1.0, None)]}
    carried = {"1 lane": [2.0], "2 lanes": [2.0]}
    return {CASE: Found("zmq tcp", is_same, [RawTcp(4.0, 20.0)], runs, carried)}


@pytest.mark.parametrize(
    ("is_same", "said"), [(True, "the same tokens"), (False, "DIFFERENT tokens"), (None, "tokens mean nothing")]
)
def test_each_rate_has_its_parts_its_share_and_its_verdict(
    capsys: pytest.CaptureFixture[str], is_same: bool | None, said: str
) -> None:
    """For programs by engine and metric, for people in a table."""
    found = _found(is_same)
    report = report_of(found, argparse.Namespace(emulate_compute="10", emulate_attention=None), has_netem=False)
    values = {(row.engine, row.metric): row.value for row in report.rows if row.case == str(CASE)}
    assert values["2 lanes", "link_share"] == 0.5
    assert values["1 lane", "exposed_transfer"] == 4.0
    assert values["plain TCP", "rate"] == 4.0
    assert values.get(("all lanes", "same_tokens_as_loopback")) == is_same
    show(report, found)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"5 Gbit/s, 200 us each way, encrypt all: plain TCP gets 4 Gbit/s, 20 us a round trip; {said}"
    assert any(line.split()[:5] == ["2", "lanes", "20", "10", "5"] for line in lines), lines
    assert any(line.startswith("offloading doesn't pay: 0.50 times") for line in lines)
    assert any("emulated" in line and "10" in line for line in lines)
    assert any("no netem" in line for line in lines)
