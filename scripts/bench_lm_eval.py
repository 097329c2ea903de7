#!/usr/bin/env python
"""lm-eval's log-likelihoods of the embedded model: through our HTTP front, and by its own backend for transformers.

    scripts/bench lm_eval [--json]

Its `local-completions` sends token ids and reads the echo's log-probabilities. The task is made of the held-out text
beside the model: verses to complete, and whole passages. Both run in fp32; the first time lm-eval is installed into an
environment of its own. Exit status 1 if a log-likelihood differs by more than 1e-3, or a greedy choice does.
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
from scripts.own_environment import python_with, without_network

from pannier.http import service as http_service
from pannier.runtime.config import HttpConfig
from tests.e2e.stack import running_stack
from tests.http.conftest import EMBEDDED, url_in

REQUIREMENTS = ("lm-eval==0.4.13", "accelerate>=1.0", "aiohttp>=3.9", "tenacity>=9")  # its extras bring much more
BEGIN = "add_bos_token=True"
"""Texts begin with the model's own first token: by default one of the two backends leaves it out."""
TOLERANCE = 1e-3
CHOICES = 3
VERSES, PASSAGES = "verses", "passages"
LIMIT_S = 600


@dataclass(frozen=True)
class Differences:
    """Of one task."""

    largest: float
    of: int
    greedy: int
    """Continuations that only one of the two backends would have drawn."""


def main() -> int:
    """Evaluate twice, compare, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    options = parser.parse_args()
    python = python_with("lm_eval", *REQUIREMENTS, ours=("torch", "transformers"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tasks(folder / "tasks", (EMBEDDED / "heldout.txt").read_text())
        expected = evaluate(python, folder, "hf", f"pretrained={EMBEDDED},dtype=float32,{BEGIN}")
        with running_stack(folder / "run", EMBEDDED, compute={"dtype": "float32"}) as (stack, _):
            stack.start(http_service.run, "http", HttpConfig(gateway=stack.endpoint, port=0))
            url = url_in(folder / "run" / "http.log")
            model = f"model=embedded,tokenizer={EMBEDDED},max_length=1024,{BEGIN}"
            server = f"base_url={url}/v1/completions,num_concurrent=8"
            found = evaluate(python, folder, "local-completions", f"{model},{server}")
    differences = {task: compare(found[task], expected[task]) for task in (VERSES, PASSAGES)}
    for task, each in differences.items():
        print(
            f"{each.of} log-likelihoods of {task} differ by at most {each.largest:.1e}, {each.greedy} greedy choices do"
        )
    if options.json:
        rows = [
            {"case": task, "engine": "offloaded", "metric": "largest_difference", "value": each.largest, "unit": "nats"}
            for task, each in differences.items()
        ]
        print(json.dumps({"command": sys.argv, "machine": platform.machine(), "versions": {}, "rows": rows}))
    return int(any(each.largest > TOLERANCE or each.greedy for each in differences.values()))


def write_tasks(folder: Path, text: str) -> None:
    """One of choices between the ends of verses, and one of passages as a whole."""
    verses = [line.split() for line in text.splitlines() if len(line.split()) >= 2]
    ends = [" ".join(words[len(words) // 2 :]) for words in verses]
    documents = [
        {"start": " ".join(words[: len(words) // 2]), "ends": [ends[(at + n) % len(ends)] for n in range(CHOICES)]}
        for at, words in enumerate(verses)
    ]
    choice = {"doc_to_text": "{{start}}", "doc_to_choice": "{{ends}}", "doc_to_target": 0}
    write_task(folder, VERSES, documents, {"output_type": "multiple_choice", **choice}, "acc")
    passages = [{"text": passage} for passage in text.split("\n\n")]
    rolling = {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}"}
    write_task(folder, PASSAGES, passages, rolling, "word_perplexity")


def write_task(folder: Path, name: str, documents: list[dict[str, Any]], says: dict[str, Any], metric: str) -> None:
    """Documents as lines of JSON, and the description, which is JSON and so YAML too."""
    folder.mkdir(exist_ok=True)
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in documents))
    source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
    description = {"task": name, **source, **says, "metric_list": [{"metric": metric}]}
    (folder / f"{name}.yaml").write_text(json.dumps(description))


def evaluate(python: Path, folder: Path, backend: str, arguments: str) -> dict[str, dict[int, Any]]:
    """What a backend answered for each document of each task."""
    out = folder / backend
    command = [str(python), "-m", "lm_eval", "run", "--model", backend, "--model_args", arguments]
    tasks = ["--tasks", VERSES, PASSAGES, "--include_path", str(folder / "tasks")]
    how = ["--device", "cpu", "--batch_size", "1", "--log_samples", "--output_path", str(out)]
    environment = {**without_network(), "HF_HOME": str(folder / "hf")}
    subprocess.run([*command, *tasks, *how], check=True, env=environment, timeout=LIMIT_S, stdout=sys.stderr)
    answers: dict[str, dict[int, Any]] = {}
    for task in (VERSES, PASSAGES):
        (samples,) = out.rglob(f"samples_{task}_*.jsonl")
        lines = [json.loads(line) for line in samples.read_text().splitlines()]
        answers[task] = {line["doc_id"]: line["resps"] for line in lines}
    return answers


def compare(found: dict[int, Any], expected: dict[int, Any]) -> Differences:
    """Of the same documents' answers."""
    assert found.keys() == expected.keys()
    pairs = [pair for at in found for pair in zip(flat(found[at]), flat(expected[at]), strict=True)]
    scores = [(float(ours), float(theirs)) for ours, theirs in pairs if ours not in ("True", "False")]
    greedy = sum(ours != theirs for ours, theirs in pairs if ours in ("True", "False"))
    return Differences(max(abs(ours - theirs) for ours, theirs in scores), len(scores), greedy)


def flat(answer: Any) -> Iterator[str]:
    """Log-likelihoods, each followed by whether it is greedy where a backend says so."""
    if isinstance(answer, list):
        for each in answer:
            yield from flat(each)
    else:
        yield str(answer)


if __name__ == "__main__":
    sys.exit(main())
