#!/usr/bin/env python
"""Random interleavings at length: many runs of the simulation that the tests run few of; exit 1 on a broken promise."""

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.interleaving.runs import run, shrink

COUNTS = ("steps", "frames", "fences", "cancels", "stale frames", "late writes refused")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=2000, help="how many runs; default %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first; the others count up from it")
    options = parser.parse_args()
    started, counts = time.perf_counter(), Counter[str]()
    for number, seed in enumerate(range(options.seed, options.seed + options.runs), 1):
        counted, broken = run(seed)
        counts += counted
        if broken is not None:
            print(f"a promise is broken by seed {seed}; shrunk:\n{shrink(broken)}")
            return 1
        if number % 500 == 0:
            print(f"{number} runs, {time.perf_counter() - started:.0f} s", file=sys.stderr)
    print(f"{'runs':>56}  {options.runs}")
    for name in (*COUNTS, *sorted(set(counts) - set(COUNTS))):
        print(f"{name:>56}  {counts[name]}")
    if not counts["stale frames"]:
        print("no frame was ever dropped as stale, so nothing was tried")
    return 0 if counts["stale frames"] else 1


if __name__ == "__main__":
    sys.exit(main())
