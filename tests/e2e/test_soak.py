"""`scripts/bench soak`, much shorter: what was preempted gives the same text, and nothing is left."""

import asyncio
from pathlib import Path

import pytest
from scripts import bench_soak

from pannier.client import Completion, CompletionOutput
from pannier.client.params import Params
from pannier.runtime.model_source import EMBEDDED
from pannier.wire.messages import TokenLogprob, TopLogprob, Usage
from tests.e2e.stack import running_stack


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_same_text_and_nothing_left_where_blocks_are_scarce(tmp_path: Path) -> None:
    """120 requests, many at a time, with shared prefixes and too few blocks; nearly every third is cancelled."""
    plan, tally = bench_soak.Plan(requests=120, prompts=6, blocks=16, seconds=120), bench_soak.Tally()
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


def _completion(tokens: tuple[int, ...], top: dict[int, float] | None = None) -> Completion:
    """An output, with the same log-probabilities reported at each place."""
    likely = tuple(TopLogprob(token, logprob) for token, logprob in (top or {}).items())
    logprobs = tuple(TokenLogprob(token, 0.0, likely) for token in tokens)
    output = CompletionOutput(" ".join(map(str, tokens)), tokens, logprobs if top else (), "length")
    return Completion((output,), (), Usage(5, 0, len(tokens)))


@pytest.mark.parametrize(
    ("params", "tokens", "verdict"),
    [
        ({"temperature": 0.0}, (1, 2), "same"),
        ({"temperature": 0.0}, (1, 3), "wrong"),
        ({"temperature": 0.0}, (1, 9), "wrong"),
        ({"temperature": 0.0}, (1,), "wrong"),
        ({"temperature": 0.0, "presence_penalty": 0.5}, (1, 3), "tie"),
        ({"temperature": 0.0, "frequency_penalty": 0.5}, (1, 3), "tie"),
        ({"temperature": 0.0, "presence_penalty": 0.5}, (3, 2), "wrong"),
        ({"temperature": 0.8}, (1, 9), "drawn otherwise"),
    ],
)
def test_only_ties_may_differ(params: Params, tokens: tuple[int, ...], verdict: str) -> None:
    """At the first difference only a token may stand that alone was as good as the best one, penalties included.

    Alone, 1 is by half better than 2 and 3, which are nearly alike; once it has occurred a penalty may take that half.
    """
    alone = _completion((1, 2), {1: -0.5, 2: -1.0, 3: -1.00005})
    tally = bench_soak.Tally()
    bench_soak.judge(bench_soak.Case([4], params, alone), _completion(tokens), tally)
    assert tally.counts == {verdict: 1}
    assert len(tally.wrong) == (verdict == "wrong")


def test_growth_counts_from_the_first_quarter_on() -> None:
    """What a process takes at first is not growth; what it takes with every request is."""
    warm_up = [(0, 100.0), (1000, 300.0)]
    steady = [(number, 300.0 + number / 500) for number in range(2500, 10001, 500)]
    assert bench_soak.growth([*warm_up, *steady]) == pytest.approx(2.0)
    assert bench_soak.growth([*warm_up, (2500, 300.0), (10000, 300.0)]) == pytest.approx(0.0)
