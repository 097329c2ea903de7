#!/usr/bin/env python
"""What the scheduler costs for each round of steps: all lanes planned and committed once, every sequence decoding.

    scripts/bench scheduler [--sizes 64 256 ...] [--seconds 3] [--json]

Every sequence runs in the middle of its output, one step is planned ahead, and lanes, blocks, prefixes and promises
are as they are when the engine runs. The last column shows whether the cost per sequence stays the same.
"""

import argparse
import gc
import json
import platform
import statistics
import sys
import time
from array import array

from pannier.scheduler import Request, Scheduler, SchedulerConfig, Step
from pannier.wire.messages import Drawn

LANES = 2
BLOCK_SIZE = 64
PROMPT = 100
MAX_MODEL_LEN = 4096


def main() -> int:
    """Print the table; the exit status is always 0: how fast is fast enough is for the reader."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 256, 1024, 4096, 16384])
    parser.add_argument("--seconds", type=float, default=3.0, help="how long each size is measured")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    options = parser.parse_args()
    print(f"{'sequences':>9}  {'median ms':>9}  {'p90 ms':>8}  {'us each':>8}")
    rows = []
    for size in options.sizes:
        times = measure(size, options.seconds)
        median, p90 = statistics.median(times), sorted(times)[len(times) * 9 // 10]
        print(f"{size:>9}  {median * 1e3:>9.3f}  {p90 * 1e3:>8.3f}  {median / size * 1e6:>8.2f}", flush=True)
        case = f"{size} sequences"
        for metric, value in (("schedule_commit_s", median), ("schedule_commit_p90_s", p90)):
            rows.append({"case": case, "engine": "scheduler", "metric": metric, "value": value, "unit": "s"})
    if options.json:
        versions = {"python": platform.python_version()}
        print(json.dumps({"command": sys.argv, "machine": platform.machine(), "versions": versions, "rows": rows}))
    return 0


def measure(size: int, seconds: float) -> list[float]:
    """Seconds of rounds of `size` sequences."""
    scheduler = scheduler_of(size)
    for lane in range(LANES):
        prompts = _plan(scheduler, lane)
        scheduler.commit(prompts.step, _drawn(prompts))
    flying = [_plan(scheduler, lane) for lane in range(LANES)]
    times: list[float] = []
    stop = time.perf_counter() + seconds
    gc.collect()
    gc.freeze()
    while time.perf_counter() < stop or len(times) < 5:
        spent = 0.0
        for lane in range(LANES):
            started = time.perf_counter()
            ahead = scheduler.schedule(lane)
            spent += time.perf_counter() - started
            step, drawn = flying[lane].step, _drawn(flying[lane])
            started = time.perf_counter()
            scheduler.commit(step, drawn)
            spent += time.perf_counter() - started
            assert ahead is not None
            flying[lane] = ahead
        times.append(spent)
        if len(times) == MAX_MODEL_LEN - PROMPT - 8:
            break
    gc.unfreeze()
    return times


def scheduler_of(size: int) -> Scheduler:
    """A scheduler with as many requests waiting, and room for them."""
    scheduler = Scheduler(
        SchedulerConfig(
            max_model_len=MAX_MODEL_LEN,
            max_batch_tokens=size * PROMPT,
            max_sequences=size,
            max_waiting=size,
            block_size=BLOCK_SIZE,
        )
    )
    for lane in range(LANES):
        scheduler.add_lane(lane)
    scheduler.add_group(0, size * (MAX_MODEL_LEN // BLOCK_SIZE))
    for number in range(size):
        prompt = array("i", [number, *range(1, PROMPT)])
        scheduler.add(Request(sequences=(number,), prompt=prompt, max_tokens=MAX_MODEL_LEN - PROMPT, seed=number))
    return scheduler


def _plan(scheduler: Scheduler, lane: int) -> Step:
    step = scheduler.schedule(lane)
    assert step is not None
    return step


def _drawn(step: Step) -> list[Drawn]:
    return [Drawn(sample.sequence, (step.step + sample.sequence) % 1000, None, ()) for sample in step.samples]


if __name__ == "__main__":
    sys.exit(main())
