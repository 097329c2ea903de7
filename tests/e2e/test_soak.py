"""`scripts/bench soak`, much shorter: what was preempted gives the same text, and nothing is left."""

import asyncio
from pathlib import Path

import pytest
from scripts import bench_soak

from pannier.runtime.model_source import EMBEDDED
from tests.e2e.stack import running_stack


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_same_text_and_nothing_left_where_blocks_are_scarce(tmp_path: Path) -> None:
    """150 requests, many at a time, with shared prefixes and too few blocks; nearly every third is cancelled."""
    plan, tally = bench_soak.Plan(requests=150, prompts=8, blocks=24, seconds=60), bench_soak.Tally()
    with running_stack(
        tmp_path / "run",
        EMBEDDED,
        attention_workers=bench_soak.ATTENTION_WORKERS,
        compute={"dtype": "float32"},
        attention={"memory": bench_soak.attention_memory(plan.blocks)},
        block_size=bench_soak.BLOCK_SIZE,
        max_sequences=bench_soak.MAX_SEQUENCES,
        max_batch_tokens=bench_soak.MAX_BATCH_TOKENS,
    ) as (stack, _client):
        asyncio.run(bench_soak.soak(plan, stack.endpoint, tally))
    failed = [check for check in bench_soak.checks(tally) if not check.passed]
    assert not failed, [*failed, *tally.wrong[:3], *tally.errors[:3]]
    assert tally.num_ended == plan.requests
    assert {group["total"] for group in tally.status["groups"].values()} == {plan.blocks}
