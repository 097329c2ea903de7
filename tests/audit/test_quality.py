"""`pannier audit quality`."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from pannier.audit.quality import Passage, difference, scored, windows
from pannier.cli import audit_quality
from pannier.cli.__main__ import app
from pannier.runtime.model_source import EMBEDDED
from tests.audit.conftest import llama


def test_a_text_is_cut_into_windows_of_which_none_is_a_single_token() -> None:
    assert windows(range(10), 4, 100) == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9)]
    assert windows(range(10), 4, 9) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert windows([], 4, 9) == []


def test_a_model_scores_each_token_by_those_before_it() -> None:
    model = llama(torch.float32)
    (found,) = scored(model, [((5, 6, 7, 8), 2)])
    with torch.inference_mode():
        logprobs = model(torch.tensor([[5, 6, 7, 8]])).logits[0].log_softmax(-1)
    assert found.logprobs == pytest.approx([float(logprobs[1, 7]), float(logprobs[2, 8])], abs=1e-6)


def test_differences_are_the_engines_less_the_references() -> None:
    ours, theirs = Passage((1, 2, 3), 1, (-1.0, -4.0)), Passage((1, 2, 3), 1, (-2.0, -2.0))
    found = difference([ours], [theirs])
    assert (found.count, found.mean_logprob, found.mean) == (2, -2.5, -0.5)
    assert (found.mean_absolute, found.largest) == (1.5, 2.0)
    with pytest.raises(ValueError, match="different tokens"):
        difference([ours], [replace(theirs, tokens=(1, 2, 4))])


def _run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["audit", "quality", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_in_float32_the_engine_says_what_the_uncut_model_says() -> None:
    """Through processes, by prompts in chunks and by decoding; the embedded model brings its held-out text."""
    code, stdout = _run("embedded", "--tokens", "400", "--context", "100", "--dtype", "float32", "--json")
    assert code == 0
    rows = json.loads(stdout.splitlines()[-1])["rows"]
    found = {(row["case"], row["engine"], row["metric"]): row["value"] for row in rows}
    for case in ("embedded held-out, 396 tokens", "embedded decoded, 64 tokens"):
        for engine in ("monolithic", "offloaded, KV auto"):
            assert found[case, engine, "largest"] < 1e-3
    assert found["embedded held-out, 396 tokens", "transformers float32", "mean_logprob"] > -4.0


def test_an_engine_that_is_too_far_off_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """By half a nat, and the tolerance is what decides."""
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32)

    async def worse(_options: Any, passages: list[tuple[int, ...]], _decode: int) -> tuple[audit_quality.Scores, str]:
        held = scored(model, [(tokens, 1) for tokens in passages])
        return {audit_quality.HELD: [replace(p, logprobs=tuple(x - 0.5 for x in p.logprobs)) for p in held]}, "float32"

    monkeypatch.setattr(audit_quality, "_ask", worse)
    few = ("embedded", "--tokens", "100", "--context", "50")
    assert _run(*few)[0] == 1
    assert _run(*few, "--tolerance", "0.6")[0] == 0


def test_a_model_without_a_text_or_a_tokenizer_is_refused(tmp_path: Path) -> None:
    for arguments, sentence in (
        (("random:llama-135m",), "no tokenizer"),
        (("embedded", "--text", str(tmp_path / "none.txt")), "can't be read"),
    ):
        result = CliRunner().invoke(app, ["audit", "quality", *arguments])
        assert sentence in str(result.exception)
