"""A compute worker in bfloat16 with attention workers that have none: through processes, with what it costs counted."""

from pathlib import Path
from typing import Any

import pytest

from pannier.client import Client
from pannier.runtime.model_source import EMBEDDED
from tests.e2e.stack import Stack, running_stack

PROMPT, MAX_TOKENS = "In the beginning God created", 12
NO_BF16 = {"emulate_dtypes": ("float16",)}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def _processes(client: Client, role: str) -> list[dict[str, Any]]:
    return [process for process in client.status()["processes"] if process["role"] == role]


def test_blocks_and_links_are_float16_where_attention_has_no_bfloat16(tmp_path: Path) -> None:
    """The compute worker converts once each way per call; nothing else does."""
    with running_stack(
        tmp_path, EMBEDDED, compute={"dtype": "bfloat16", "lanes": 1}, attention=NO_BF16, heartbeat_s=0.1
    ) as (_, client):
        text = client.complete(PROMPT, max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True).text
        (compute,) = _until_beaten(client, MAX_TOKENS)
        attention = _processes(client, "attention")
    assert len(text) > MAX_TOKENS
    assert (compute["dtype"], compute["wire_dtype"]) == ("bfloat16", "float16")
    assert {worker["dtype"] for worker in attention} == {"float16"}
    counters, calls = compute["counters"], compute["calls"]
    assert counters["converted_to_wire"] == calls * MAX_TOKENS
    assert counters["converted_from_wire"] == calls * (MAX_TOKENS - 1), "a fresh prompt has no answer"
    assert "saturated_values" not in counters
    assert not any("converted_pieces" in worker["counters"] for worker in attention)


def _until_beaten(client: Client, steps: int) -> list[dict[str, Any]]:
    """The compute workers once their heartbeats tell of so many steps."""
    while True:
        workers = _processes(client, "compute")
        if all(worker["counters"].get("steps", 0) >= steps for worker in workers):
            return workers


def test_a_worker_that_lacks_the_type_that_is_wanted_ends_with_one_error(tmp_path: Path) -> None:
    stack = Stack(tmp_path)
    stack.gateway(EMBEDDED, kv_dtype="bfloat16")
    worker = stack.attention("attention-0", **NO_BF16)
    worker.join(60)
    last = (tmp_path / "attention-0.log").read_text().splitlines()[-1]
    stack.stop()
    assert worker.exitcode == 1
    assert "attention-0 (cpu (emulated: natively float16)) keeps K and V in float32, float16, " in last
    assert "and not in bfloat16" in last
