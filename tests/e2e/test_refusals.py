"""What can't be served is refused in one clear sentence, by the process that a person started."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from pannier.client import Client, RequestFailed
from tests.e2e.models import save_random_model, save_tokenizer
from tests.e2e.stack import START_S, Stack, running_stack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_random_model("llama", folder)
    return folder


def _last_words(stack: Stack, name: str) -> str:
    """The last line of a process that is expected to end by itself, badly."""
    process = stack.processes[name]
    process.join(START_S)
    assert process.exitcode == 1, process.exitcode
    return (stack.folder / f"{name}.log").read_text().splitlines()[-1]


def test_a_worker_with_another_model_is_turned_away(model: Path, tmp_path: Path) -> None:
    """It ends and says both models; the gateway goes on."""
    other = tmp_path / "other"
    save_random_model("mistral", other)
    stack = Stack(tmp_path)
    stack.gateway(model)
    stack.compute(other, dtype="float32", cache_dir=tmp_path / "cache")
    try:
        words = _last_words(stack, "compute-0")
    finally:
        codes = stack.stop()
    assert words.startswith("pannier: compute compute-0: compute-0 serves other (")
    assert f"this gateway serves {model.name} (" in words
    assert codes["gateway"] == 0


def test_a_busy_address_is_named(model: Path, tmp_path: Path) -> None:
    """A second gateway on the same sockets says which address is taken, and leaves the first one alone."""
    stack = Stack(tmp_path)
    stack.gateway(model)
    try:
        with Client(stack.endpoint, connect_timeout_s=START_S) as client:
            client.status()
            stack.gateway(model, name="second")
            assert f"{stack.control} is in use by another process" in _last_words(stack, "second")
            client.status()
    finally:
        stack.stop()


@pytest.mark.parametrize(
    ("model_type", "settings", "reason"),
    [
        ("mamba", {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}, "mamba"),
        ("bert", {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}, "bert"),
    ],
)
def test_a_model_that_can_not_be_sliced_is_refused(
    model_type: str, settings: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    """The compute worker names the type and why, and ends."""
    folder = tmp_path / "model"
    AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, vocab_size=64, **settings)).save_pretrained(
        folder
    )
    save_tokenizer(folder)
    stack = Stack(tmp_path)
    stack.compute(folder, dtype="float32", cache_dir=tmp_path / "cache")
    try:
        words = _last_words(stack, "compute-0")
    finally:
        stack.stop()
    assert words.startswith(f"pannier: compute compute-0: {reason}")


@pytest.mark.parametrize(
    ("request_fields", "param", "sentence"),
    [
        ({"prompt": "x" * 300}, "prompt", "prompt has 300 tokens and the model's window is 256"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens", "max_tokens must be at least 1, not 0"),
        ({"prompt": ""}, "prompt", "prompt is empty"),
        ({"prompt": "x", "temperature": -1.0}, "temperature", "temperature must be between 0 and 2, not -1"),
    ],
)
def test_bad_requests(serving: Client, request_fields: dict[str, Any], param: str, sentence: str) -> None:
    """The field, its value and what is legal; the stack serves on."""
    prompt = request_fields.pop("prompt")
    with pytest.raises(RequestFailed, match=sentence) as failed:
        serving.complete(prompt, **request_fields)
    assert (failed.value.code, failed.value.param) == ("invalid", param)
    assert serving.complete("hello", max_tokens=2, ignore_eos=True).usage.completion_tokens == 2


@pytest.fixture(scope="module")
def serving(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("serving")
    settings = {"dtype": "float32", "cache_dir": folder / "cache"}
    with running_stack(folder / "run", model, attention_workers=1, compute=settings) as (_, client):
        yield client


def test_no_tokenizer_no_text(model: Path, tmp_path: Path) -> None:
    """A folder without tokenizer is refused by the gateway that is to speak its text."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((model / name).read_bytes())
    stack = Stack(tmp_path)
    stack.gateway(folder)
    try:
        assert f"{folder} has no tokenizer" in _last_words(stack, "gateway")
    finally:
        stack.stop()
