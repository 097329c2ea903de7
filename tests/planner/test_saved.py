from pathlib import Path

import pytest

from pannier.planner import TraceRequest, simulate
from pannier.planner.mix import Mix
from pannier.planner.offloaded import Wire
from pannier.planner.saved import SavedPlan, read_plan, write_plan
from tests.planner.engines import kind, offloaded

LAYOUT = offloaded(wire=Wire(round_trip_s=1e-3), mix=Mix.equal(900, 200), attention=kind(memory_bytes=4e8))


def test_a_plan_comes_back_as_it_was_written(tmp_path: Path) -> None:
    figures = LAYOUT.figures()
    assert figures is not None
    plan = SavedPlan.of("a plan", LAYOUT, figures)
    write_plan(tmp_path / "plan.json", plan)
    assert read_plan(tmp_path / "plan.json") == plan


@pytest.mark.parametrize("has_prefill", [False, True])
def test_a_simulation_finds_about_what_the_plan_says(has_prefill: bool) -> None:
    """With always more requests than there is room for: its tokens a second, between filling and emptying."""
    layout = offloaded(
        wire=Wire(round_trip_s=1e-3),
        mix=Mix.equal(64, 200) if has_prefill else Mix.equal(1, 263),
        attention=kind(memory_bytes=4e8),
        has_prefill=has_prefill,
    )
    figures = layout.figures()
    assert figures is not None
    plan = SavedPlan.of("a plan", layout, figures)
    requests = [TraceRequest(0.0, int(layout.mix.prompt), int(layout.mix.output))] * (5 * figures.sequences)
    result = simulate(requests, plan.setup(), plan.clock)
    assert result.output_tokens_per_s == pytest.approx(figures.tokens_per_s, rel=0.25)
