"""Random runs: each follows from its seed, and a broken promise is shrunk to the fewest events that break it."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from traceback import format_exc

import torch
from structlog.testing import capture_logs

from .violation import Violation
from .world import Shape, World

EVENTS = {
    World.ask: 14,
    World.hold: 5,
    World.beat: 6,
    World.cancel: 3,
    World.stop: 2.5,
    World.silence: 2.5,
    World.go_on: 3,
    World.restart: 4,
    World.end_compute: 0.8,
    World.fail: 0.6,
    World.end_attention: 0.5,
    World.silence_attention: 0.3,
}
NUM_EVENTS = 45
TICKS_BETWEEN = 30
"""At most, between two events."""


@dataclass(frozen=True)
class Broken:
    """A run in which a promise was broken."""

    seed: int
    events: tuple[int, ...]
    """Numbers of the events that happened; the others were left out."""
    names: tuple[str, ...]
    reason: str
    log: tuple[str, ...]

    def __str__(self) -> str:
        happened = "\n".join(f"  {number}: {name}" for number, name in zip(self.events, self.names, strict=True))
        return f"seed {self.seed}, events {self.events}:\n{happened}\n" + "\n".join(self.log[-40:]) + "\n" + self.reason


def run(seed: int, events: frozenset[int] | None = None) -> tuple[Counter[str], Broken | None]:
    """One run; with `events` only those happen. Returns what was counted, and what went wrong."""
    happened: list[tuple[int, str]] = []
    with _one_thread(), torch.inference_mode(), capture_logs() as log:
        world = World(Shape.draw(Random(f"shape {seed}")), Random(f"schedule {seed}"))
        try:
            world.begin()
            for number, event in enumerate(_events(seed)):
                for _ in range(world.chance.randrange(TICKS_BETWEEN)):
                    world.tick()
                if events is None or number in events:
                    happened.append((number, event.__name__))
                    event(world)
            world.settle()
        except Exception:  # noqa: BLE001  # whatever is raised in a run is what the run has found
            numbers, names = zip(*happened, strict=True) if happened else ((), ())
            lines = tuple(" ".join(f"{key}={value}" for key, value in entry.items()) for entry in log)
            return world.watch.counts, Broken(seed, numbers, names, format_exc(), lines)
        finally:
            world.close()
    return world.watch.counts, None


@contextmanager
def _one_thread() -> Iterator[None]:
    """Tensors as small as these are only slowed down by more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _events(seed: int) -> list[Callable[[World], None]]:
    """Each run leaves some kinds out, or the rare ones would drown what the others do."""
    chance = Random(f"events {seed}")
    kinds = [event for event in EVENTS if event is World.ask or chance.random() < 0.6]
    return chance.choices(kinds, [EVENTS[event] for event in kinds], k=NUM_EVENTS)


def shrink(broken: Broken) -> Broken:
    """Leave out events as long as some promise stays broken."""
    for size in (8, 4, 2, 1):
        start = 0
        while start < len(broken.events):
            fewer = frozenset(broken.events[:start] + broken.events[start + size :])
            again = run(broken.seed, fewer)[1]
            if again is None:
                start += size
            else:
                broken = again
    return broken


def run_many(seeds: range) -> Counter[str]:
    """Runs with all these seeds, and what was counted. Raises `Violation` for the first that breaks a promise."""
    counts: Counter[str] = Counter()
    for seed in seeds:
        counted, broken = run(seed)
        if broken is not None:
            raise Violation(str(shrink(broken)))
        counts += counted
    return counts
