"""`pannier bench serve`: the load comes when it should, and what is reported is what clients saw."""

import asyncio
import json
from collections.abc import AsyncIterator
from itertools import pairwise
from math import inf
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import httpx
import pytest

from pannier.cli.arrivals import at_rate, at_speed
from pannier.cli.bench_serve import serve
from pannier.cli.load import Ask
from pannier.cli.serving import HttpTarget, Seen, ServerError, ZmqTarget, serve_all
from pannier.cli.serving_result import good, vllm_fields
from pannier.client import AsyncClient
from tests.http.conftest import KEY, Front

pytestmark = pytest.mark.timeout(120)


def test_gaps_have_the_rate_and_the_burstiness_that_were_asked_for() -> None:
    """Poisson: the spread of the gaps is their mean; the first request comes at once, and a seed repeats it all."""
    for shape, spread in ((1.0, 1.0), (0.25, 2.0), (100.0, 0.1)):
        moments = at_rate(20_000, 50.0, shape, seed=1)
        gaps = [later - earlier for earlier, later in pairwise(moments)]
        assert moments[0] == 0.0
        assert fmean(gaps) == pytest.approx(0.02, rel=0.05)
        assert pstdev(gaps) / fmean(gaps) == pytest.approx(spread, rel=0.05)
    assert at_rate(5, 2.0, 1.0, seed=3) == at_rate(5, 2.0, 1.0, seed=3) != at_rate(5, 2.0, 1.0, seed=4)
    assert at_rate(3, inf, 1.0, seed=0) == [0.0, 0.0, 0.0]
    assert at_speed([0.0, 4.0], 2.0) == [0.0, 2.0]


class Clockwork:
    """A server that gives a token every tick, and an error to who asks for 13."""

    def __init__(self) -> None:
        self.running = self.most = 0

    async def vocab_size(self) -> int:
        return 10

    async def stream(self, ask: Ask) -> AsyncIterator[int]:
        if ask.output == 13:
            raise ServerError("unlucky")
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            for _ in range(ask.output):
                await asyncio.sleep(0.002)
                yield 1
        finally:
            self.running -= 1


def test_no_more_run_at_once_than_were_allowed_and_an_error_is_one_requests_own() -> None:
    target = Clockwork()
    asks = [Ask([1, 2], output) for output in (3, 5, 13, 4, 3, 3, 2, 1)]
    seen, total_s = asyncio.run(serve_all(target, asks, [0.0] * len(asks), 3))
    assert target.most == 3
    assert [each.tokens for each in seen] == [3, 5, 0, 4, 3, 3, 2, 1]
    assert [each.error for each in seen] == [None, None, "unlucky", None, None, None, None, None]
    assert all(len(each.between_s) == each.tokens - 1 for each in seen if each.tokens)
    assert total_s >= max(each.latency_s for each in seen)


def test_the_fields_are_those_of_vllm_and_their_figures_add_up() -> None:
    seen = [
        Seen(10, 3, 0.0, 3, 0.1, [0.02, 0.04], 0.16),
        Seen(20, 2, 0.5, 2, 0.3, [0.05], 0.35),
        Seen(5, 9, 0.5, error="gone"),
    ]
    fields = vllm_fields(seen, 2.0, {"ttft": 200.0}, {"backend": "x"})
    expected = {
        "backend": "x", "num_prompts": 3, "completed": 2, "failed": 1, "total_input_tokens": 30,
        "total_output_tokens": 5, "request_throughput": 1.0, "request_goodput": 0.5, "output_throughput": 2.5,
        "total_token_throughput": 17.5, "errors": ["", "", "gone"], "input_lens": [10, 20, 5],
    }  # fmt: skip
    assert {name: fields[name] for name in expected} == expected
    assert fields["mean_ttft_ms"] == pytest.approx(200)
    assert fields["median_itl_ms"] == pytest.approx(40)
    assert fields["mean_tpot_ms"] == pytest.approx((30 + 50) / 2)
    assert fields["p99_e2el_ms"] == pytest.approx(350)
    assert good(seen, {"tpot": 40.0, "e2el": 1000.0}) == 1
    json.dumps(fields)


@pytest.mark.slow
def test_both_ways_to_a_real_server_see_every_token(front: Front) -> None:
    """Over HTTP and over the gateway's own protocol."""

    async def main() -> list[list[int]]:
        asks = [Ask([40, 41, 42 + number], 6 + number) for number in range(6)]
        headers = {"Authorization": f"Bearer {KEY}"}
        async with (
            AsyncClient(front.stack.endpoint) as client,
            httpx.AsyncClient(base_url=front.url, headers=headers, timeout=60) as http,
        ):
            targets = (ZmqTarget(client), HttpTarget(http, "embedded"))
            assert [await target.vocab_size() for target in targets] == [3072, 3072]
            found = [await serve_all(target, asks, [0.0] * 6, None) for target in targets]
            with pytest.raises(ServerError, match="400"):
                async for _ in HttpTarget(http, "embedded").stream(Ask([1] * 3000, 5)):
                    pass
        assert not [each.error for seen, _ in found for each in seen if each.error]
        return [[each.tokens for each in seen] for seen, _ in found]

    assert asyncio.run(main()) == [[6, 7, 8, 9, 10, 11]] * 2


@pytest.mark.slow
def test_the_command_writes_what_it_found(front: Front, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file with vLLM's fields, a table, and our own object as the last line."""
    file = tmp_path / "result.json"
    options: dict[str, Any] = {
        "endpoint": front.stack.endpoint, "num_prompts": 8, "input": 12, "output": 5, "request_rate": 200.0,
        "burstiness": 1.0, "max_concurrency": 4, "goodput": ["e2el:60000"], "seed": 1, "save_result": file,
        "as_json": True, "url": None, "insecure": False, "keys": None, "model": "", "api_key": None, "trace": None,
        "max_length": 512, "speed": 1.0,
    }  # fmt: skip
    serve(**options)
    lines = capsys.readouterr().out.splitlines()
    rows = {row["metric"]: row["value"] for row in json.loads(lines[-1])["rows"]}
    saved = json.loads(file.read_text())
    assert (saved["completed"], saved["total_output_tokens"], rows["completed"]) == (8, 40, 8.0)
    assert rows["request_goodput"] == pytest.approx(saved["request_throughput"])
    assert any("ttft" in line for line in lines[:-1])
