"""What `pannier complete` and `pannier chat` ask for and show, against a gateway by hand."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pannier.cli.__main__ import app
from pannier.wire.messages import Delta, Generate, SamplingParams, TokenLogprob, Usage
from tests.client.conftest import FakeGateway

pytestmark = pytest.mark.timeout(60)


def answer(message: Generate) -> list[Delta]:
    """As many outputs as were asked for, in two chunks each, the last output first."""
    request, n = message.request, message.params.n
    logprobs = () if message.params.logprobs is None else (TokenLogprob(5, -0.5, ()),)
    deltas = []
    for index in reversed(range(n)):
        usage = Usage(3, 0, 2 * n) if index == 0 else None
        deltas.append(Delta(request, index, f"ox {index}", (4,), (), (), None, None))
        deltas.append(Delta(request, index, " pulls", (5,), logprobs, (), "length", usage))
    return deltas


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[FakeGateway]:
    with FakeGateway(f"ipc://{tmp_path}/gateway", answer) as made:
        yield made


def ask(gateway: FakeGateway, *arguments: str, said: str = "") -> tuple[str, Generate]:
    """What the command prints, and what it asked for."""
    ran = CliRunner().invoke(app, [*arguments, "--endpoint", gateway.endpoint], input=said, catch_exceptions=False)
    assert ran.exit_code == 0, ran.output
    return ran.stdout, gateway.next_request()


FILTERS = ("--temperature", "0.5", "--top-p", "0.9", "--top-k", "5", "--min-p", "0.1", "--repetition-penalty", "1.5")
FILTERED: dict[str, Any] = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.5}


def test_one_output_is_printed_as_it_comes(gateway: FakeGateway) -> None:
    """With the parameters that were given."""
    shown, message = ask(gateway, "complete", "x", *FILTERS, "--seed", "7", "--stop", "a", "--stop", "b")
    assert shown == "ox 0 pulls\n"
    assert message.params == SamplingParams(**FILTERED, seed=7, stop=("a", "b"))


def test_several_outputs_are_printed_one_after_the_other(gateway: FakeGateway) -> None:
    """In the order of their numbers, each with its log-probabilities."""
    shown, message = ask(gateway, "complete", "x", "--n", "2", "--logprobs", "0")
    assert message.params.n == 2
    assert [line.split() for line in shown.splitlines()] == [
        ["[1]", "ox", "0", "pulls"],
        ["5", "-0.5000"],
        ["[2]", "ox", "1", "pulls"],
        ["5", "-0.5000"],
    ]


def test_json_has_every_output(gateway: FakeGateway) -> None:
    """The first one where the only one of a request for one is."""
    one = json.loads(ask(gateway, "complete", "x", "--json")[0])
    assert (one["text"], one["tokens"], one["finish_reason"]) == ("ox 0 pulls", [4, 5], "length")
    assert "outputs" not in one
    two = json.loads(ask(gateway, "complete", "x", "--n", "2", "--json")[0])
    assert [output["text"] for output in two["outputs"]] == ["ox 0 pulls", "ox 1 pulls"]
    assert (two["text"], two["usage"]["completion_tokens"]) == ("ox 0 pulls", 4)


def test_chat_takes_the_same_filters(gateway: FakeGateway) -> None:
    """For every turn."""
    shown, message = ask(gateway, "chat", *FILTERS, "--seed", "7", "--stop", "a", said="hello\n")
    assert shown == "ox 0 pulls\n"
    assert message.params == SamplingParams(**FILTERED, seed=7, stop=("a",))
