#!/usr/bin/env python
"""Thousands of requests through real processes with too few blocks: is anything lost, leaked or said differently?

    scripts/bench soak [--requests 10000] [--prompts 200] [--blocks 20] [--seconds 3600] [--seed 0] [--json]

A gateway, a compute worker with two lanes and two attention workers serve the embedded model in fp32. First every
continuation is asked for alone, without any cached prefix; then many at a time, with prefixes shared and so few blocks
that sequences are preempted all the time, and nearly every third is cancelled at some random moment. Exit status 1 when

- a greedy text differs from the one alone, but for ties: there the two best log-probabilities lie within 1e-4. Those,
  and seeded draws that differ (of which nothing can tell how near they were), are at most 0.1 % of the requests;
- a request fails, or in the end a block, a request or the scheduler's books are not as they should be;
- a process grows by 1 MB or more for every 1,000 requests after the first quarter of them;
- nothing was tried: no preemption, no prefix hit, no cancelled request.
"""

import argparse
import asyncio
import itertools
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import linear_regression
from typing import Any

from transformers import AutoConfig

from pannier.cli.report import Report
from pannier.cli.serve import serve
from pannier.cli.stack import ServeOptions
from pannier.client import AsyncClient, ClientError, Completion, CompletionOutput
from pannier.client.completion import join
from pannier.client.params import Params
from pannier.runtime.model_source import EMBEDDED

ATTENTION_WORKERS = 2
BLOCK_SIZE = 16
MAX_SEQUENCES = 32
MAX_BATCH_TOKENS = 64
"""Fewer than most prompts have, so that these come in chunks."""
CLIENTS = 4
IN_FLIGHT = 32
"""Requests at a time, of all clients together."""
CONTINUATIONS = 2
"""Ways, of parameters and lengths, in which each prompt is continued."""
TOKENS = range(10, 3000)
"""What prompts are made of: no special tokens."""
LONGEST_OUTPUT = 48
CANCELLED = 0.3
TIE = 1e-4
MAX_TIES = 0.001
"""Share of the requests."""
MAX_GROWTH = 1.0
"""MB for every 1,000 requests."""
JUDGED_FROM = 2000
"""Requests below which growth is shown and not judged: what a process first touches outweighs what it loses."""
SAMPLES = 100
"""Looks at the processes' memory, or one for every 100 requests if that is more."""
PATIENCE_S = 900.0
"""A request that takes longer hangs. So long, for a busy machine may stop everything for some minutes."""
SETTLE_S = 10.0
MAX_ERRORS = 20

STYLES: dict[str, tuple[int, Params]] = {
    "plain": (10, {}),
    "log-probabilities": (3, {"logprobs": 5}),
    "penalties": (3, {"presence_penalty": 0.6, "frequency_penalty": 0.4}),
    "stop strings": (3, {"stop": ["the LORD", " children", "ing"]}),
    "stop string kept": (1, {"stop": [" and the"], "include_stop": True, "min_tokens": 1}),
    "two outputs": (2, {"n": 2}),
    "seeded": (2, {"n": 2, "temperature": 0.8, "top_p": 0.95, "repetition_penalty": 1.1, "seed": 7}),
}
"""Ways to draw, how often each is taken, and its parameters beside the defaults here: greedy."""


@dataclass(frozen=True)
class Plan:
    """How much is asked of the stack."""

    requests: int = 10000
    prompts: int = 200
    """Distinct ones."""
    blocks: int = 20
    """Of 16 tokens: they hold four or five sequences of the usual length."""
    seconds: float = 3600.0
    """No request begins later than so long after the start."""
    seed: int = 0
    """Of all that is random."""


@dataclass(eq=False)
class Case:
    """A prompt and how it is continued."""

    prompt: list[int]
    params: Params
    alone: Completion | None = None
    """What it gives when nothing else runs, with log-probabilities."""

    @property
    def num_tokens(self) -> int:
        """The most that it draws, over all outputs."""
        return (self.params["max_tokens"] or 0) * self.params.get("n", 1)


@dataclass(frozen=True)
class Visit:
    """One request: what is asked, and how long its client stays."""

    case: Case
    leaves_after: int | None
    """Tokens; 0: before it has looked at any, None: it stays to the end."""
    leaves_after_s: float


@dataclass
class Tally:
    """What has come of the requests so far."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    logprob_error: float = 0.0
    memory: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    """Of each process: MB resident after so many requests."""
    status: dict[str, Any] = field(default_factory=dict)
    """Of the stack when all is over."""
    seconds: float = 0.0

    @property
    def num_ended(self) -> int:
        """Requests that have ended in any way."""
        return self.counts["completed"] + self.counts["cancelled"] + len(self.errors)


@dataclass(frozen=True)
class Check:
    """One thing that must hold."""

    name: str
    value: float
    unit: str
    wanted: str
    passed: bool


# --- what is asked ----------------------------------------------------------------------------------------------------


def make_cases(num_prompts: int, chance: Random) -> list[Case]:
    """Continuations of distinct prompts, of which most share some blocks of their beginning with others."""
    prefixes = [_tokens(chance, BLOCK_SIZE, 4 * BLOCK_SIZE) for _ in range(-(-num_prompts // 10))]
    prompts = [
        (chance.choice(prefixes) if chance.random() < 0.8 else []) + _tokens(chance, 1, 24) for _ in range(num_prompts)
    ]
    weights = [weight for weight, _ in STYLES.values()]
    cases = []
    for prompt in prompts:
        for _ in range(CONTINUATIONS):
            ((_, style),) = chance.choices(list(STYLES.values()), weights)
            params: Params = {"temperature": 0.0, "max_tokens": chance.randint(1, LONGEST_OUTPUT), **style}
            cases.append(Case(prompt, params))
    return cases


def _tokens(chance: Random, least: int, most: int) -> list[int]:
    return chance.choices(TOKENS, k=chance.randint(least, most))


def make_visits(cases: list[Case], chance: Random) -> Iterator[Visit]:
    """Requests without end. Clients that leave do so before the first token, in the middle or just before the end."""
    while True:
        case = chance.choice(cases)
        moments = (0, chance.randint(1, case.num_tokens), max(0, case.num_tokens - 1))
        leaves = chance.random() < CANCELLED
        yield Visit(case, chance.choice(moments) if leaves else None, chance.random() ** 2)


# --- asking -----------------------------------------------------------------------------------------------------------


async def ask_alone(client: AsyncClient, cases: Iterable[Case]) -> None:
    """Find out what each case gives by itself: one after the other, and nothing is shared."""
    for number, case in enumerate(cases):
        params: Params = {**case.params, "logprobs": 20}
        case.alone = await client.complete(case.prompt, timeout_s=PATIENCE_S, cache_salt=f"alone {number}", **params)


async def ask_many(clients: list[AsyncClient], visits: Iterator[Visit], tally: Tally, until: float) -> None:
    """Ask one thing after the other, with others beside, until there is none or it is too late."""

    async def ask_on(client: AsyncClient) -> None:
        for visit in visits:
            if time.monotonic() > until or len(tally.errors) >= MAX_ERRORS:
                return
            await _visit(client, visit, tally)

    async with asyncio.TaskGroup() as group:
        for number in range(IN_FLIGHT):
            group.create_task(ask_on(clients[number % len(clients)]))


async def _visit(client: AsyncClient, visit: Visit, tally: Tally) -> None:
    try:
        completion = await _ask(client, visit)
    except ClientError as error:
        tally.errors.append(f"{type(error).__name__}: {error}")
        return
    if completion is None:
        tally.counts["cancelled"] += 1
        return
    tally.counts["completed"] += 1
    tally.counts["prompt tokens"] += completion.usage.prompt_tokens
    tally.counts["cached tokens"] += completion.usage.cached_tokens
    judge(visit.case, completion, tally)


async def _ask(client: AsyncClient, visit: Visit) -> Completion | None:
    """None where the client left before the end."""
    case, chunks, num_tokens = visit.case, [], 0
    async with client.stream(case.prompt, timeout_s=PATIENCE_S, **case.params) as stream:
        if visit.leaves_after == 0:
            await asyncio.sleep(visit.leaves_after_s)
            return None
        async for chunk in stream:
            chunks.append(chunk)
            num_tokens += len(chunk.tokens)
            if chunk.usage is None and visit.leaves_after is not None and num_tokens >= visit.leaves_after:
                return None
    return join(chunks)


# --- is it the same? --------------------------------------------------------------------------------------------------


def judge(case: Case, completion: Completion, tally: Tally) -> None:
    """Compare a completion with the one alone."""
    assert case.alone is not None
    verdicts = {_verdict(case, *pair) for pair in zip(completion.outputs, case.alone.outputs, strict=True)}
    verdict = next(each for each in ("wrong", "drawn otherwise", "tie", "same") if each in verdicts)
    tally.counts[verdict] += 1
    if verdict == "wrong":
        found, expected = ([(each.tokens, each.finish_reason) for each in c.outputs] for c in (completion, case.alone))
        tally.wrong.append(f"{case.params} of {len(case.prompt)} tokens gave {found} instead of {expected}")
    for output, alone in zip(completion.outputs, case.alone.outputs, strict=True):
        if output.tokens == alone.tokens:
            for ours, theirs in zip(output.logprobs, alone.logprobs, strict=bool(output.logprobs)):
                tally.logprob_error = max(tally.logprob_error, abs(ours.logprob - theirs.logprob))


def _verdict(case: Case, output: CompletionOutput, alone: CompletionOutput) -> str:
    if all(getattr(output, name) == getattr(alone, name) for name in ("tokens", "text", "finish_reason")):
        return "same"
    tokens = zip(output.tokens, alone.tokens, strict=False)
    place = next((place for place, (ours, theirs) in enumerate(tokens) if ours != theirs), None)
    if place is None:
        return "wrong"
    if case.params["temperature"] > 0:
        return "drawn otherwise"
    scores = _scores(case.params, alone, place)
    return "tie" if scores.get(output.tokens[place], -1e9) >= max(scores.values()) - TIE else "wrong"


def _scores(params: Params, alone: CompletionOutput, place: int) -> dict[int, float]:
    """What a greedy draw compares, but for a constant: the log-probabilities are those before penalties."""
    occurred = Counter(alone.tokens[:place])
    presence, frequency = params.get("presence_penalty", 0.0), params.get("frequency_penalty", 0.0)
    return {
        top.token: top.logprob - presence * (top.token in occurred) - frequency * occurred[top.token]
        for top in alone.logprobs[place].top
    }


# --- memory -----------------------------------------------------------------------------------------------------------


async def watch_memory(pids: dict[str, int], tally: Tally, every: int) -> None:
    """Look at the processes whenever so many more requests have ended; for ever."""
    due = 0
    while True:
        if tally.num_ended >= due:
            for name, pid in pids.items():
                tally.memory.setdefault(name, []).append((tally.num_ended, resident_mb(pid)))
            due = tally.num_ended + every
        await asyncio.sleep(0.1)


def resident_mb(pid: int) -> float:
    """Counted page by page; what statm says may be off by some pages for every core."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Rss:")) / 1024


def growth(samples: list[tuple[int, float]]) -> float:
    """MB for every 1,000 requests after the first quarter: the slope of the straight line through them."""
    late = [sample for sample in samples if sample[0] >= samples[-1][0] / 4]
    return linear_regression(*zip(*late, strict=True)).slope * 1000 if len(late) > 1 else 0.0


# --- the run ----------------------------------------------------------------------------------------------------------


async def soak(plan: Plan, endpoint: str, tally: Tally) -> None:
    """Ask the stack at `endpoint`, which serves the embedded model and is ready, for everything."""
    chance = Random(plan.seed)
    cases = make_cases(plan.prompts, chance)
    visits = make_visits(cases, chance)
    until = time.monotonic() + plan.seconds
    async with AsyncExitStack() as open_clients:
        clients = [await open_clients.enter_async_context(AsyncClient(endpoint)) for _ in range(CLIENTS)]
        before = await clients[0].status()
        await ask_alone(clients[0], cases)
        _say(f"{len(cases)} continuations asked for alone")
        pids = {process["name"]: process["pid"] for process in before["processes"]} | {"client": os.getpid()}
        watching = [
            asyncio.create_task(watch_memory(pids, tally, max(1, min(100, plan.requests // SAMPLES)))),
            asyncio.create_task(_show_progress(tally)),
        ]
        started = time.monotonic()
        await ask_many(clients, itertools.islice(visits, plan.requests), tally, until)
        tally.seconds = time.monotonic() - started
        for task in watching:
            task.cancel()
        tally.status = await settled_status(clients[0])


async def serve_and_soak(plan: Plan, tally: Tally) -> None:
    """Start a stack, ask it for everything, and stop it."""
    options = ServeOptions(
        model="embedded",
        dtype="float32",
        attention=str(ATTENTION_WORKERS),
        attention_memory=str(attention_memory(plan.blocks)),
        block_size=BLOCK_SIZE,
        max_sequences=MAX_SEQUENCES,
        max_batch_tokens=MAX_BATCH_TOKENS,
    )
    await serve(options, lambda _client, endpoint: soak(plan, endpoint, tally))


def attention_memory(num_blocks: int) -> int:
    """Bytes that so many blocks take in the attention worker that has more of the heads."""
    model = AutoConfig.from_pretrained(EMBEDDED)
    heads = -(-model.num_key_value_heads // ATTENTION_WORKERS)
    return num_blocks * BLOCK_SIZE * int(model.num_hidden_layers * heads * 2 * model.head_dim * 4)


async def settled_status(client: AsyncClient) -> dict[str, Any]:
    """The status once nothing is under way any more; or as it is after a while."""
    until = time.monotonic() + SETTLE_S
    while True:
        status = await client.status(timeout_s=SETTLE_S)
        if not any(status["requests"].values()) and not any(group["used"] for group in status["groups"].values()):
            return status
        if time.monotonic() > until:
            return status
        await asyncio.sleep(0.1)


async def _show_progress(tally: Tally) -> None:
    while True:
        await asyncio.sleep(10)
        wrong, ties = tally.counts["wrong"], tally.counts["tie"] + tally.counts["drawn otherwise"]
        _say(f"{tally.num_ended} requests, {wrong} wrong, {ties} ties, {len(tally.errors)} errors")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# --- what came of it --------------------------------------------------------------------------------------------------


def checks(tally: Tally) -> list[Check]:
    """Everything that must hold."""
    counts, status = tally.counts, tally.status
    groups = status["groups"].values()
    astray = sum(group["used"] + abs(group["total"] - group["free"] - group["cached"]) for group in groups)
    near = counts["tie"] + counts["drawn otherwise"]
    return [
        _none("wrong texts", "requests", counts["wrong"]),
        Check("ties", near, "requests", f"at most {MAX_TIES:.1%}", near <= MAX_TIES * tally.num_ended),
        Check("log-probability error", tally.logprob_error, "", f"at most {TIE:g}", tally.logprob_error <= TIE),
        _none("errors", "requests", len(tally.errors)),
        _none("blocks leaked", "blocks", astray),
        _none("accounting errors", "times", status["accounting_errors"]),
        _none("left under way", "requests", sum(status["requests"].values())),
        _some("preemptions", "times", status["preemptions"]),
        _some("prefix hits", "tokens", counts["cached tokens"]),
        _some("cancelled", "requests", counts["cancelled"]),
        *(_growth_check(name, samples, tally) for name, samples in tally.memory.items()),
    ]


def _none(name: str, unit: str, value: float) -> Check:
    return Check(name, value, unit, "none", value == 0)


def _some(name: str, unit: str, value: float) -> Check:
    return Check(name, value, unit, "some", value > 0)


def _growth_check(name: str, samples: list[tuple[int, float]], tally: Tally) -> Check:
    slope, is_judged = growth(samples), tally.num_ended >= JUDGED_FROM
    wanted = f"less than {MAX_GROWTH:g}" if is_judged else f"not judged below {JUDGED_FROM} requests"
    return Check(f"growth of {name}", slope, "MB/1000 requests", wanted, slope < MAX_GROWTH or not is_judged)


def facts(tally: Tally) -> Iterator[tuple[str, float, str]]:
    """What is told beside: metric, value and unit."""
    counts = tally.counts
    yield "requests", tally.num_ended, "requests"
    yield "completed", counts["completed"], "requests"
    yield "same text", counts["same"], "requests"
    yield "draws that differ", counts["drawn otherwise"], "requests"
    yield "speed", tally.num_ended / tally.seconds, "requests/s"
    yield "prefix hits of prompt tokens", 100 * counts["cached tokens"] / max(1, counts["prompt tokens"]), "%"
    yield "blocks", sum(group["total"] for group in tally.status["groups"].values()), "blocks"
    for name, samples in tally.memory.items():
        yield f"last memory of {name}", samples[-1][1], "MB"


def show(tally: Tally, found: list[Check]) -> None:
    """The table, and what is wrong in full."""
    for line in (*tally.wrong[:3], *tally.errors[:3]):
        print(line)
    for name, value, unit in facts(tally):
        print(f"      {name:<32} {value:>10.4g} {unit}")
    for check in found:
        verdict = "ok" if check.passed else "FAILED"
        print(f"{verdict:<6}{check.name:<32} {check.value:>10.4g} {check.unit} ({check.wanted})")


def main() -> int:
    """Run it; the exit status is 1 when something does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=Plan.requests, help="default %(default)s")
    parser.add_argument("--prompts", type=int, default=Plan.prompts, help="distinct ones; default %(default)s")
    parser.add_argument("--blocks", type=int, default=Plan.blocks, help="of 16 tokens; default %(default)s")
    parser.add_argument("--seconds", type=float, default=Plan.seconds, help="stop after these; default %(default)s")
    parser.add_argument("--seed", type=int, default=Plan.seed, help="of all that is random; default %(default)s")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    options = parser.parse_args()
    plan, tally = Plan(**{name: getattr(options, name) for name in Plan.__dataclass_fields__}), Tally()
    asyncio.run(serve_and_soak(plan, tally))
    if not tally.status:
        print(f"interrupted: {len(tally.errors)} errors, {dict(tally.counts)}")
        return 1
    found = checks(tally)
    show(tally, found)
    if tally.num_ended < plan.requests:
        print(f"stopped early: {tally.num_ended} of {plan.requests} requests in {plan.seconds:.0f} s")
    if options.json:
        print(report(tally, found, f"{tally.num_ended} requests of {plan.prompts} prompts").to_json("offloaded"))
    return 0 if all(check.passed for check in found) else 1


def report(tally: Tally, found: list[Check], case: str) -> Report:
    """All figures in the form that every measuring command has."""
    made = Report("bench soak")
    for name, value, unit in (*facts(tally), *((check.name, check.value, check.unit) for check in found)):
        made.add(case, "offloaded", name.replace(" ", "_").replace("-", "_"), unit, [value])
    for name, samples in tally.memory.items():
        made.add(case, "offloaded", f"memory_of_{name}", "MB", [resident for _, resident in samples])
    return made


if __name__ == "__main__":
    sys.exit(main())
