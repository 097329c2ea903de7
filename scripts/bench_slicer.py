#!/usr/bin/env python
"""Which of the library's causal types can be sliced, and whether any passes its proof and is wrong all the same.

    python scripts/bench_slicer.py [--types llama gemma2 ...] [--variants 3] [--json]

Every type is proved as the library configures it by default. If it passes, models of that type with other sizes,
seeds, lengths and settings are sliced and compared with themselves uncut, by an attention of this script's own: several
sequences in random chunks, each chunk's partial result merged with that of its past, as workers do it. `wrong` counts
types that passed their proof and differ here; the exit status is 1 if there are any. A difference is looked at twice
more, with other weights: where two experts are equally good but for rounding, about one comparison in three hundred
differs by chance.
"""

import argparse
import copy
import json
import math
import multiprocessing
import os
import platform
import random
import sys
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from pannier.slicer import Attend, CannotSlice, SlicedModel, slice_model
from pannier.slicer.prove import prove
from pannier.slicer.refusal import one_line
from pannier.slicer.shrink import Kind, Recipe, kind_of, shrink

TOLERANCE = 1e-4  # of the largest logit
NUDGE = 3e-7  # of a weight: a few roundings
LONGEST = 96
SPREADS = (2.2, 1.4, 0.8, 0.4)
TIME_LIMIT_S = 600
Settings = dict[str, Any]
Partial = tuple[torch.Tensor, torch.Tensor]  # output [T, H, Dv], log-sum-exp [T, H]


@dataclass
class Verdict:
    """What became of one type."""

    model_type: str
    verdict: str  # works, refused or wrong
    reason: str = ""
    largest_difference: float = 0.0
    compared: int = 0  # configurations
    variants: list[str] = field(default_factory=list)
    seconds: float = 0.0


# Attention, by merging partial results.


def partial(asked: Attend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, distance: torch.Tensor) -> Partial:
    """Attention of q over k where `distance` [T, S], from key to query, is neither negative nor beyond the window."""
    call = asked.call
    heads = torch.arange(call.q_heads) * call.kv_heads // call.q_heads
    scores = torch.matmul(q.transpose(0, 1), k[:, heads].permute(1, 2, 0)).double() * call.scale
    if call.softcap:
        scores = (scores / call.softcap).tanh() * call.softcap
    hidden = (distance < 0) | (distance >= (call.window or math.inf))
    scores = scores.masked_fill(hidden, -math.inf)
    total = scores.logsumexp(-1)
    weights = torch.where(total.isfinite()[..., None], (scores - total[..., None]).exp(), 0.0)
    return (weights @ v[:, heads].transpose(0, 1).double()).transpose(0, 1), total.T


def merge(a: Partial, b: Partial) -> Partial:
    """The attention over both of what two partial results saw."""
    total = torch.logaddexp(a[1], b[1])
    share = [torch.where(total.isfinite(), (x[1] - total).exp(), 0.0)[..., None] for x in (a, b)]
    return share[0] * a[0] + share[1] * b[0], total


@dataclass
class Conversation:
    """One sequence: its tokens, how far it is, and its keys and values, call by call."""

    ids: torch.Tensor
    want: torch.Tensor
    done: int = 0
    kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def attend(self, asked: Attend, rows: slice, sinks: torch.Tensor | None) -> torch.Tensor:
        q, k, v = asked.q[rows], asked.k[rows], asked.v[rows]
        here = torch.arange(self.done, self.done + len(q))
        result = partial(asked, q, k, v, here[:, None] - here[None])
        if past := self.kept.get(asked.call.index):
            result = merge(result, partial(asked, q, *past, here[:, None] - torch.arange(self.done)[None]))
            k, v = torch.cat([past[0], k]), torch.cat([past[1], v])
        self.kept[asked.call.index] = (k, v)
        if sinks is not None:
            result = merge(result, (torch.zeros_like(result[0]), sinks.double().expand_as(result[1])))
        return result[0].to(asked.q.dtype)


def step(model: SlicedModel, chosen: list[tuple[Conversation, int]], dice: random.Random) -> float:
    """Runs some tokens of some sequences; the largest difference among some of the rows."""
    ids = torch.cat([one.ids[one.done : one.done + size] for one, size in chosen])
    positions = torch.cat([torch.arange(one.done, one.done + size) for one, size in chosen])
    want = torch.cat([one.want[one.done : one.done + size] for one, size in chosen])
    rows = sorted(dice.sample(range(len(ids)), dice.randint(0, len(ids))))
    got = drive(model, model.run(ids, positions, torch.tensor(rows, dtype=torch.int64)), chosen)
    for one, size in chosen:
        one.done += size
    difference = float((got - want[rows]).abs().max() / want.abs().max()) if rows else 0.0
    return difference if math.isfinite(difference) else math.inf


def drive(model: SlicedModel, running: Any, chosen: list[tuple[Conversation, int]]) -> torch.Tensor:
    answer = None
    while True:
        try:
            asked = running.send(answer)
        except StopIteration as finished:
            logits: torch.Tensor = finished.value
            return logits
        starts = [sum(size for _, size in chosen[:i]) for i in range(len(chosen))]
        spans = [(one, slice(start, start + size)) for (one, size), start in zip(chosen, starts, strict=True)]
        answer = torch.cat([one.attend(asked, rows, model.sinks(asked.call)) for one, rows in spans])


def steady_conversations(model: PreTrainedModel, sequences: list[torch.Tensor]) -> list[Conversation]:
    """Sequences over which the uncut model doesn't stand before a choice that rounding would decide.

    A router that drops experts at a threshold is not continuous: a score beside it may fall on either side, in the
    uncut model too, and then logits differ without anything being wrong.

    Raises:
        ValueError: there are fewer than three.
    """
    weights = list(model.parameters())
    exact = [weight.detach().clone() for weight in weights]
    with torch.no_grad():
        wanted = torch.stack([model(ids[None], use_cache=False).logits[0] for ids in sequences])
        moved = torch.zeros(len(sequences))
        for _ in range(4):
            for weight, value in zip(weights, exact, strict=True):
                weight.copy_(value * (1 + NUDGE * torch.randn_like(value)))
            nudged = torch.stack([model(ids[None], use_cache=False).logits[0] for ids in sequences])
            moved = torch.maximum(moved, (nudged - wanted).abs().amax((1, 2)) / wanted.abs().max())
        for weight, value in zip(weights, exact, strict=True):
            weight.copy_(value)
    steady = [
        Conversation(*pair)
        for pair, by in zip(zip(sequences, wanted, strict=True), moved, strict=True)
        if not by > TOLERANCE
    ]
    if len(steady) < 3:
        raise ValueError("rounding changes its logits too much to compare them")
    return steady


def largest_difference(model: PreTrainedModel, seed: int, cache_dir: Path) -> float:
    """Slices a model and compares, over sequences in random chunks: the largest difference, over the largest logit."""
    dice, vocabulary = random.Random(seed), min(model.config.get_text_config().vocab_size, 250)
    talks = steady_conversations(model, [torch.randint(40, vocabulary, (LONGEST,)) for _ in range(12)])[:3]
    if not all(talk.want.isfinite().all() for talk in talks):
        raise ValueError("the uncut model's logits aren't finite")
    sliced = slice_model(model, max_model_len=LONGEST, cache_dir=cache_dir)
    largest = 0.0
    with torch.inference_mode():
        while unfinished := [talk for talk in talks if talk.done < LONGEST]:
            among = dice.sample(unfinished, dice.randint(1, len(unfinished)))
            sizes = [dice.choice((1, dice.randint(1, 30))) for _ in among]
            chosen = [(talk, min(size, LONGEST - talk.done)) for talk, size in zip(among, sizes, strict=True)]
            largest = max(largest, step(sliced, chosen, dice))
    return largest


# Configurations unlike those that the proof sees.


def nothing(_: Settings) -> Settings:
    return {}


def tied(settings: Settings) -> Settings | None:
    return {"tie_word_embeddings": not settings["tie_word_embeddings"]} if "tie_word_embeddings" in settings else None


def one_kv_head(settings: Settings) -> Settings | None:
    return {"num_key_value_heads": 1} if settings.get("num_key_value_heads", 1) > 1 else None


def equal_heads(settings: Settings) -> Settings | None:
    both = "num_attention_heads" in settings and "num_key_value_heads" in settings
    return {"num_key_value_heads": settings["num_attention_heads"]} if both else None


def biases(settings: Settings) -> Settings | None:
    names = [name for name, value in settings.items() if "bias" in name and isinstance(value, bool)]
    return {name: not settings[name] for name in names} or None


def windows(settings: Settings) -> Settings | None:
    if "sliding_window" not in settings:
        return None
    changes: Settings = {"sliding_window": 23}
    if "use_sliding_window" in settings:
        changes |= {"use_sliding_window": True, "max_window_layers": 1, "layer_types": None}
    return changes


def rotary(**parameters: Any) -> Callable[[Settings], Settings | None]:
    def change(settings: Settings) -> Settings | None:
        now = settings.get("rope_parameters")
        if not isinstance(now, dict) or now.get("rope_type") != "default":
            return None
        return {"rope_parameters": now | parameters}

    return change


def long_rope(settings: Settings) -> Settings | None:
    if not isinstance(settings.get("head_dim"), int):
        return None
    pairs = int(settings["head_dim"] * settings.get("partial_rotary_factor", 1.0)) // 2
    factors = {"short_factor": [1.0 + 0.1 * i for i in range(pairs)], "long_factor": [2.0 + i for i in range(pairs)]}
    original = {"original_max_position_embeddings": LONGEST // 3}
    changes = rotary(rope_type="longrope", factor=3.0, **original, **factors)(settings)
    return changes and changes | {name: value for name, value in original.items() if name in settings}


VARIANTS: dict[str, Callable[[Settings], Settings | None]] = {
    "sizes": nothing,
    "tied": tied,
    "windows": windows,
    "one-kv-head": one_kv_head,
    "equal-heads": equal_heads,
    "biases": biases,
    "linear-rope": rotary(rope_type="linear", factor=4.0),
    "dynamic-rope": rotary(rope_type="dynamic", factor=4.0),
    "yarn-rope": rotary(rope_type="yarn", factor=4.0, original_max_position_embeddings=24),
    "llama3-rope": rotary(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=24
    ),
    "long-rope": long_rope,
}
SIZES = (Recipe(hidden=96, heads=6, head=24, value=20), Recipe(hidden=96, heads=4, head=24, value=24), Recipe(divide=8))


def variants(model_type: str, config: PretrainedConfig, limit: int) -> Iterator[tuple[str, PretrainedConfig]]:
    """Some configurations of the type: always other sizes, and some of the others, which ones depends on the type."""
    names = list(VARIANTS)
    rest = names[1:]
    random.Random(zlib.crc32(model_type.encode())).shuffle(rest)
    given = 0
    for name in [names[0], *rest]:
        if given == limit:
            return
        for recipe in SIZES:
            try:
                small = shrink(config, LONGEST, recipe).to_dict()
                changes = VARIANTS[name](small)
                if changes is None:
                    break
                changed = enlarge(small) | changes
                varied = type(config).from_dict(copy.deepcopy(changed))
                build(varied, 1)
            except Exception as error:  # noqa: BLE001 (a type may refuse settings in any way)
                print(f"  {model_type} {name}: {one_line(error)}", file=sys.stderr)
                continue
            given += 1
            yield name, varied
            break


def enlarge(settings: Settings) -> Settings:
    """Room for the sequences of this script, and windows of another length, in parts of the model too."""
    longer = {name: LONGEST + 8 for name in settings if kind_of(name) is Kind.LONGEST}
    window = {name: 19 for name in ("sliding_window", "window_size") if isinstance(settings.get(name), int)}
    parts = {name: enlarge(part) for name, part in settings.items() if name.endswith("_config") and part}
    return settings | longer | window | parts


def build(config: PretrainedConfig, seed: int) -> PreTrainedModel:
    """A random model that runs, of weights drawn in another way than the proof's, and that doesn't amplify rounding.

    Raises:
        ValueError: it does, whatever the weights.
    """
    for spread in SPREADS:
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
        model.train(False)
        with torch.no_grad():
            for weight in model.parameters():
                width = spread * weight.shape[-1] ** -0.5 if weight.ndim > 1 else 0.5
                weight.add_(torch.empty_like(weight).uniform_(-width, width))
            before = model(torch.arange(41, 41 + LONGEST)[None], use_cache=False).logits
            for weight in model.parameters():
                weight.copy_(torch.nextafter(weight, torch.full_like(weight, math.inf)))
            after = model(torch.arange(41, 41 + LONGEST)[None], use_cache=False).logits
        if (before - after).abs().max() < TOLERANCE / 4 * before.abs().max():
            return cast(PreTrainedModel, model)
    raise ValueError("rounding changes its logits too much to compare them")


# One type, all types.


def default(model_type: str) -> PretrainedConfig:
    """The library's default configuration, with the sizes that it leaves open."""
    config = CONFIG_MAPPING[model_type]()
    settings = config.to_dict()
    heads, hidden = settings.get("num_attention_heads") or 1, settings.get("hidden_size") or 1
    sizes = {"num_key_value_heads": heads, "head_dim": hidden // heads, "num_experts_per_tok": 2, "topk_group": 1}
    sizes |= {"n_group": 1, "n_routed_experts": 8, "moe_topk": 2, "n_shared_experts": 1}
    openings = {name: size for name, size in sizes.items() if name in settings and settings[name] is None}
    return type(config).from_dict(settings | openings) if openings else config


def judge(model_type: str, limit: int) -> Verdict:
    """Proves one type, and tries to find it wrong."""
    begin, verdict = time.monotonic(), Verdict(model_type, "works")
    with tempfile.TemporaryDirectory() as folder:
        try:
            config = default(model_type)
            prove(config, getattr(config, "max_position_embeddings", None) or 2048, Path(folder))
        except CannotSlice as refusal:
            verdict.verdict, verdict.reason = "refused", refusal.reason
        except Exception as error:  # noqa: BLE001 (the library's default configuration may not be one)
            verdict.verdict, verdict.reason = "refused", f"has no usable default configuration ({one_line(error)})"
        else:
            vary(verdict, config, limit, Path(folder))
    verdict.seconds = time.monotonic() - begin
    return verdict


def vary(verdict: Verdict, config: PretrainedConfig, limit: int, cache_dir: Path) -> None:
    for name, varied in variants(verdict.model_type, config, limit):
        seed = zlib.crc32(name.encode())
        try:
            difference = largest_difference(build(varied, 1), seed, cache_dir)
            if not difference <= TOLERANCE:
                verdict.variants.append(f"{name} {difference:.1e}, twice more:")
                difference = max(largest_difference(build(varied, again), seed, cache_dir) for again in (2, 3))
        except CannotSlice as refusal:
            verdict.variants.append(f"{name} refused: {refusal.reason}")
            continue
        except Exception as error:  # noqa: BLE001 (a variant that the uncut model itself can't run says nothing)
            verdict.variants.append(f"{name} not run: {one_line(error)}")
            continue
        verdict.variants.append(f"{name} {difference:.1e}")
        verdict.compared += 1
        verdict.largest_difference = max(verdict.largest_difference, difference)
        if not difference <= TOLERANCE:
            verdict.verdict, verdict.reason = "wrong", f"{name}: differs by {difference:.1e} of the largest logit"


def child(model_type: str, limit: int, answer: Connection) -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    answer.send_bytes(json.dumps(asdict(judge(model_type, limit))).encode())


def judge_apart(model_type: str, limit: int) -> Verdict:
    """Judges one type in a process of its own, within the time limit."""
    context = multiprocessing.get_context("forkserver")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=child, args=(model_type, limit, send))
    process.start()
    send.close()
    try:
        if receive.poll(TIME_LIMIT_S):
            return Verdict(**json.loads(receive.recv_bytes()))
        return Verdict(model_type, "refused", f"took longer than {TIME_LIMIT_S} s")
    except EOFError:
        return Verdict(model_type, "refused", "ended its process")
    finally:
        process.kill()
        process.join()


def report(verdicts: list[Verdict]) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    numbers = {name: sum(verdict.verdict == name for verdict in verdicts) for name in ("works", "refused", "wrong")}
    numbers["compared"] = sum(verdict.compared > 0 for verdict in verdicts)
    for name, number in numbers.items():
        rows.append({"case": "all types", "engine": "slicer", "metric": name, "value": number, "unit": "types"})
    for one in verdicts:
        case = {"case": one.model_type, "engine": "slicer"}
        if one.verdict == "refused":
            rows.append(case | {"metric": "refused", "value": 1, "unit": "types", "reason": one.reason})
        else:
            rows.append(
                case | {"metric": "largest_difference", "value": one.largest_difference, "unit": "of the largest logit"}
            )
    return {
        "command": "scripts/bench_slicer.py",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "rows": rows,
        "ratios": [],
    }


def show(verdict: Verdict) -> None:
    detail = verdict.reason or f"{verdict.largest_difference:.1e}"
    print(f"{verdict.verdict:8} {verdict.model_type:26} {verdict.seconds:5.0f} s  {detail}", flush=True)
    for variant in verdict.variants:
        print(f"{'':10}{variant}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", nargs="*", default=list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), help="default: all")
    parser.add_argument("--variants", type=int, default=3, help=f"configurations of each, at most {len(VARIANTS)}")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="print one object as the last line")
    options = parser.parse_args()
    multiprocessing.get_context("forkserver").set_forkserver_preload(["torch._dynamo", "pannier.slicer"])
    verdicts = []
    with ThreadPoolExecutor(options.processes) as pool:
        for verdict in pool.map(lambda name: judge_apart(name, options.variants), options.types):
            verdicts.append(verdict)
            show(verdict)
    wrong = sum(verdict.verdict == "wrong" for verdict in verdicts)
    print(*(f"{row['value']} {row['metric']}" for row in report(verdicts)["rows"][:4]), sep=", ")
    if options.json:
        print(json.dumps(report(verdicts)))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
