"""`dtype_strict` in a stack of processes: casts that are planted in a worker fail its steps, a clean one serves."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from pannier.attention import service as attention_service
from pannier.client import Client, ClientError
from pannier.compute import service as compute_service
from pannier.runtime.model_source import EMBEDDED
from tests.e2e.stack import START_S, Stack

PROMPT, MAX_TOKENS = "In the beginning God created", 12
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

Role = Callable[[Any], int]


def weights_cast_in_every_step(config: Any) -> int:
    """A compute worker whose linear layers multiply in another type than their weights are in."""
    from pannier.slicer import model

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        assert bias is None
        return torch.nn.functional.linear(x.to(torch.bfloat16), weight.to(torch.bfloat16)).to(x.dtype)

    vars(model)["linear"] = linear
    return compute_service.run(config)


def cache_cast_in_every_step(config: Any) -> int:
    """An attention worker that converts all of K and V before it attends."""
    from pannier.attention import shard

    attend = vars(shard)["paged_attention"]

    def paged_attention(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *args: Any, **others: Any) -> Any:
        return attend(q, keys.to(torch.bfloat16), values.to(torch.bfloat16), *args, **others)

    vars(shard)["paged_attention"] = paged_attention
    return attention_service.run(config)


class Planted(Stack):
    """A stack, one of whose roles is replaced by a faulty one."""

    def __init__(self, folder: Path, faulty: dict[Role, Role]) -> None:
        super().__init__(folder)
        self._faulty = faulty

    def start(self, role: Role, name: str, config: Any) -> Any:
        return super().start(self._faulty.get(role, role), name, config)


@contextmanager
def _running(
    folder: Path, faulty: dict[Role, Role], *, strict: bool = True, **gateway: Any
) -> Iterator[tuple[Client, Stack]]:
    folder.mkdir(exist_ok=True)
    stack = Planted(folder, faulty)
    stack.gateway(EMBEDDED, heartbeat_s=0.1, **gateway)
    stack.compute(EMBEDDED, dtype="float32", lanes=1, dtype_strict=strict)
    stack.attention("attention-0", dtype_strict=strict)
    try:
        with Client(stack.endpoint, connect_timeout_s=START_S) as client:
            stack.wait_until_ready(client)
            yield client, stack
    finally:
        codes = stack.stop()
    assert set(codes.values()) == {0}, codes


def _text(client: Client) -> str:
    return client.complete(PROMPT, max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True).text


def test_a_clean_stack_serves_the_same_text(tmp_path: Path) -> None:
    """And its status says of each role what it is in, and why."""
    texts = []
    for strict in (False, True):
        with _running(tmp_path / str(strict), {}, strict=strict) as (client, _):
            texts.append(_text(client))
            processes = client.status()["processes"]
    assert texts[0] == texts[1]
    dtypes = {process["role"]: process["dtypes"] for process in processes if "dtypes" in process}
    assert {role: choice["dtype"] for role, choice in dtypes["compute"].items()} == {
        "compute": "float32", "storage": "float32", "logits": "float32", "wire": "float32",
    }  # fmt: skip
    assert dtypes["compute"]["compute"]["reason"] == "asked for"
    assert set(dtypes["attention"]) == {"kv", "wire"}


@pytest.mark.parametrize(
    ("faulty", "reason"),
    [
        ({compute_service.run: weights_cast_in_every_step}, "converts a weight"),
        ({attention_service.run: cache_cast_in_every_step}, "converts the KV cache"),
    ],
    ids=["weights", "cache"],
)
def test_a_planted_cast_fails_the_step_with_its_reason(tmp_path: Path, faulty: dict[Role, Role], reason: str) -> None:
    with _running(tmp_path / "strict", faulty) as (client, _), pytest.raises(ClientError) as caught:
        _text(client)
    assert f"{reason} [" in str(caught.value)
    assert "from float32 to bfloat16" in str(caught.value)
    with _running(tmp_path / "not", faulty, strict=False) as (client, _):
        assert len(_text(client)) > MAX_TOKENS  # it would have served


def test_types_that_differ_by_agreement_are_an_error_too(tmp_path: Path) -> None:
    """K and V in another type than the model: counted without `dtype_strict`, refused step by step with it."""
    with _running(tmp_path, {}, kv_dtype="bfloat16") as (client, _), pytest.raises(ClientError) as caught:
        _text(client)
    assert "dtype_strict: the model computes torch.float32 and links carry torch.bfloat16" in str(caught.value)
