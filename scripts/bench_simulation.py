#!/usr/bin/env python
"""How fast a trace is simulated, where the time goes, and whether the prefix cache hits what it ideally could.

With hash ids (Mooncake) the requests come one at a time, with unlimited room and blocks of the 512 tokens that an id
stands for; exit 1 when the hit rate is not within 1 % of the ideal one, computed from the ids alone.
"""

import argparse
import resource
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from pannier.planner import (
    HASHED_TOKENS,
    Setup,
    SimulationResult,
    TraceRequest,
    ideal_hit_rate,
    read_trace,
    repeated,
    simulate,
)
from pannier.planner.lamina import LLAMA3_70B_ON_2_H100_AND_4_H20, group_blocks
from pannier.scheduler import Scheduler
from pannier.scheduler.blocks import blocks_for

CALLS = ("add", "schedule", "commit", "take_preemptions")
TOLERANCE = 0.01


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True, help="an Azure csv or a Mooncake jsonl")
    parser.add_argument("--limit", type=int, help="only the trace's first requests")
    parser.add_argument("--repeat", type=int, default=1, help="the trace so many times; default %(default)s")
    parser.add_argument("--replicas", type=int, default=1, help="compute replicas, each with a group; %(default)s")
    options = parser.parse_args()

    def requests() -> Iterator[TraceRequest]:
        return repeated(lambda: islice(read_trace(options.trace), options.limit), options.repeat)

    has_ids = next(requests()).hash_ids is not None
    setup = unlimited(requests()) if has_ids else crowded(options.replicas)
    inside = time_inside(Scheduler)
    started = time.process_time()
    result = simulate(requests(), setup, LLAMA3_70B_ON_2_H100_AND_4_H20)
    report(result, time.process_time() - started, inside)
    return compare(result.hit_rate, ideal_hit_rate(requests())) if has_ids else 0


def unlimited(requests: Iterator[TraceRequest]) -> Setup:
    """Room for every token of the trace, one request at a time."""
    num_blocks = sum(blocks_for(each.prompt_length + each.output_length, HASHED_TOKENS) for each in requests)
    return Setup(groups=(num_blocks,), block_size=HASHED_TOKENS, max_batch_tokens=8192, lanes=1, one_at_a_time=True)


def crowded(replicas: int) -> Setup:
    """The paper's devices at the trace's own times: more comes than they can do."""
    return Setup(groups=(group_blocks(64),) * replicas, replicas=replicas)


def time_inside(scheduler: type) -> dict[str, float]:
    """From now on, seconds of CPU time in each of the scheduler's calls."""
    seconds = dict.fromkeys(CALLS, 0.0)

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            started = time.process_time()
            try:
                return call(*args)
            finally:
                seconds[name] += time.process_time() - started

        return run

    for name in CALLS:
        setattr(scheduler, name, timed(name, getattr(scheduler, name)))
    return seconds


def report(result: SimulationResult, seconds: float, inside: dict[str, float]) -> None:
    """A table for people."""
    rows = {
        "requests": f"{result.requests}",
        "steps": f"{result.steps}, of {result.batch.mean:.1f} sequences",
        "simulated": f"{result.seconds:.0f} s",
        "took": f"{seconds:.1f} s of CPU time, {result.requests / seconds:.0f} requests/s",
        "a step's sequence": f"{seconds / (result.steps * result.batch.mean) * 1e6:.1f} us",
        **{f"in {name}": f"{spent / seconds:.1%}" for name, spent in inside.items()},
        "in the simulator": f"{1 - sum(inside.values()) / seconds:.1%}",
        "largest memory": f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB",
    }
    for name, value in rows.items():
        print(f"{name:>20}  {value}")


def compare(found: float, ideal: float) -> int:
    """0 when the hit rate is the ideal one."""
    off = abs(found / ideal - 1)
    print(f"{'prefix hit rate':>20}  {found:.4%}, ideal {ideal:.4%}: off by {off:.4%}")
    return 0 if off <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
