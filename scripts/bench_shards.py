#!/usr/bin/env python
"""Two attention workers, one of them with half the bandwidth and half the memory: does their uneven split pay?

    scripts/bench shards [--rows 16] [--context 4096] [--output 96] [--repeats 7] [--json]

A small random model with 8 KV heads through real processes. Its compute is emulated and takes nearly nothing of this
machine; attention is real, and slowed down by waiting to two fifths of its speed on one worker and to one fifth on the
other, so that they are in nobody's way here.
Timed by turns are the split that the gateway chooses and four heads each. Exit status 1 when the gateway splits evenly,
or when its split has not at least 1.2 times less attention time; ideal is 1.33.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parent.parent))
from pannier.cli.load import Ask, Load
from pannier.cli.overlap_run import Run, Window, run
from pannier.cli.report import Report
from pannier.client import AsyncClient, Client
from tests.e2e.models import VOCAB, save_tokenizer
from tests.e2e.stack import Stack

LAYERS, HEADS, KV_HEADS, HEAD_SIZE = 2, 16, 8, 64
BLOCK = 64
TOKEN_BYTES = LAYERS * KV_HEADS * 2 * HEAD_SIZE * 2
"""Of K and V in bfloat16."""
RATES = (0.4, 0.2)
COMPUTE_MS = 2
LEAST_GAIN, IDEAL_GAIN = 1.2, 4 / 3
CHOSEN, EVEN = "chosen", "even"
MS = 1e3


@dataclass(frozen=True)
class Engine:
    """A stack that is ready: where clients find it, the KV heads of its workers, and its blocks."""

    endpoint: str
    split: tuple[int, ...]
    blocks: int


def main() -> int:
    """Run both by turns, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16, help="of each step")
    parser.add_argument("--context", type=int, default=4096, help="tokens of each prompt")
    parser.add_argument("--output", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    options = parser.parse_args()
    load = Load.equal(options.rows, options.context, options.output)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stacks:
        model = save_model(Path(name) / "model", options.context + options.output)
        engines = {
            which: stacks.enter_context(serving(Path(name), which, model, load, split))
            for which, split in ((CHOSEN, None), (EVEN, (KV_HEADS // 2,) * 2))
        }
        found = {which: list[Window]() for which in engines}
        for repeat in range(options.repeats):
            for which, engine in engines.items():
                window = asyncio.run(measure(engine, load.asks(repeat, VOCAB))).window
                assert window is not None, "at no moment all requests decoded: give them a longer --output"
                found[which].append(window)
    report = report_of(load.name, engines, found)
    report.print(CHOSEN)
    gain = next(r.value for r in report.ratios(CHOSEN) if r.metric == "attention")
    split = engines[CHOSEN].split
    print(f"{'+'.join(map(str, split))} has {gain:.2f} times less attention time than 4+4; ideal is {IDEAL_GAIN:.2f}")
    if options.json:
        print(report.to_json(CHOSEN))
    return int(len(set(split)) == 1 or gain < LEAST_GAIN)


def save_model(folder: Path, longest: int) -> Path:
    """A random model with a window of `longest` tokens."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_SIZE,
        max_position_embeddings=longest,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@contextmanager
def serving(folder: Path, name: str, model: Path, load: Load, split: tuple[int, ...] | None) -> Iterator[Engine]:
    """A ready stack of one compute and two unlike attention workers; the split is the gateway's if None."""
    (folder / name).mkdir()
    stack = Stack(folder / name)
    tokens = sum(-(-sum(each) // BLOCK) * BLOCK for each in load.lengths)
    stack.gateway(
        model,
        attention_workers=2,
        heads_split=split,
        max_sequences=len(load.lengths),
        # Nearly all of a prompt comes in one chunk, which attends to little that is stored.
        max_batch_tokens=load.lengths[0].prompt + len(load.lengths),
        block_size=BLOCK,
        prefix_cache=False,
    )
    stack.compute(model, dtype="bfloat16", lanes=1, cache_dir=folder / "cache", emulate_compute=(COMPUTE_MS,))
    for number, rate in enumerate(RATES):
        memory = int(tokens * TOKEN_BYTES / 2 * rate / min(RATES))  # the slow one has room for four heads of eight
        stack.attention(f"attention-{number}", memory=memory, emulate_rate=rate)
    try:
        with Client(stack.endpoint, connect_timeout_s=120) as client:
            status = stack.wait_until_ready(client)
        yield Engine(stack.endpoint, heads_of(status), status["groups"]["0"]["total"])
    finally:
        codes = stack.stop()
    assert set(codes.values()) == {0}, codes


def heads_of(status: dict[str, Any]) -> tuple[int, ...]:
    """How many KV heads each attention worker has, the fast one first."""
    workers = sorted((p["name"], p["heads"]) for p in status["processes"] if p["role"] == "attention")
    return tuple(stop - start for _, ((start, stop),) in workers)


async def measure(engine: Engine, asks: list[Ask]) -> Run:
    """One repeat."""
    async with AsyncClient(engine.endpoint) as client:
        return await run(client, asks)


def report_of(load: str, engines: dict[str, Engine], found: dict[str, list[Window]]) -> Report:
    """Figures of a lane-step."""
    report = Report(
        "bench shards",
        settings={which: {"heads": "+".join(map(str, engine.split))} for which, engine in engines.items()},
    )
    for which, windows in found.items():
        for part in ("attention", "transfer"):
            report.add(load, which, part, "ms", [MS * each.of_step(f"{part}_s") for each in windows])
        report.add(load, which, "lane_step", "ms", [MS * each.lane_step_s for each in windows])
        report.add(load, which, "tokens_per_s", "tokens/s", [each.tokens / each.wall_s for each in windows])
        report.add(load, which, "blocks", "blocks", [float(engines[which].blocks)])
    return report


if __name__ == "__main__":
    sys.exit(main())
