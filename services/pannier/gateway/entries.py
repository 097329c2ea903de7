"""What a gateway keeps of each worker, and of each session of those that compute together."""

from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from pannier.wire import messages as m


class Standing(StrEnum):
    """Where a worker stands with its gateway."""

    REGISTERED = "registered"
    """Said hello; its data thread has not joined."""
    JOINED = "joined"
    """Can be given something to do."""
    STARTING = "starting"
    """Was told what to do, and is not ready."""
    READY = "ready"
    FENCING = "fencing"
    """Its session ends: attention workers have yet to say that nothing of it can be written."""
    LOST = "lost"
    """Silent; it may come back, into a new session."""


@dataclass
class AttentionEntry:
    """One attention worker."""

    hello: m.Hello
    facts: m.AttentionFacts
    missed: int = 0
    """Heartbeats that were due since the last one came."""
    standing: Standing = Standing.REGISTERED
    assign: m.AttentionAssign | None = None
    counters: dict[str, float] = field(default_factory=dict)


@dataclass
class ComputeEntry:
    """One compute worker. Its lanes have numbers of their own among all lanes."""

    hello: m.Hello
    facts: m.ComputeFacts
    first_lane: int
    missed: int = 0
    """Heartbeats that were due since the last one came."""
    joined: bool = False
    """Whether its data thread can be reached."""
    alive: bool = True
    """False while nothing is heard of it."""
    leaves: bool = False
    """Once its session is over it is forgotten (its process has ended), not restarted."""
    session: "Session | None" = None
    lost_links: int = 0
    """Sessions in a row that a lost link has ended before any step was done."""
    detail: str = ""
    """How its links run."""
    counters: dict[str, float] = field(default_factory=dict)

    @property
    def standing(self) -> Standing:
        """Where it stands; in a session, where that stands."""
        if self.session is not None:
            return self.session.standing
        if not self.alive:
            return Standing.LOST
        return Standing.JOINED if self.joined else Standing.REGISTERED

    @property
    def stage(self) -> tuple[int, int]:
        """(number, count) of the model's stages: which of them it runs."""
        stage = self.facts.stage
        return (0, 1) if stage is None else (stage.number, stage.count)


@dataclass
class Session:
    """Compute workers that run the model together, one stage each and most often a single one, until they are fenced.

    The lanes are those of the first of them.
    """

    number: int
    workers: tuple[ComputeEntry, ...]
    """In the order of their stages."""
    standing: Standing = Standing.STARTING
    unready: set[str] = field(default_factory=set)
    """Workers that have yet to say that their links are in place."""
    fences: set[tuple[str, str]] = field(default_factory=set)
    """(Attention worker, compute worker) whose end the former has yet to acknowledge."""
    failed: m.StepFailed | None = None
    """The step for which it ends."""
    done: dict[int, dict[int, m.StageDone | m.StepDone]] = field(default_factory=dict)
    """Step -> stage -> what it said, until all of them are done with it."""

    @property
    def first_lane(self) -> int:
        """Number of its lane 0 in the scheduler."""
        return self.workers[0].first_lane

    @property
    def lanes(self) -> range:
        """Numbers of its lanes in the scheduler."""
        return range(self.first_lane, self.first_lane + self.workers[0].facts.lanes)

    @property
    def names(self) -> list[str]:
        """Of its workers."""
        return [worker.hello.name for worker in self.workers]

    def collect(self, worker: ComputeEntry, done: m.StageDone | m.StepDone) -> m.StepDone | None:
        """A step with the times of all stages summed up, once the last of them is done with it."""
        worker.lost_links = 0
        of_step = self.done.setdefault(done.step, {})
        of_step[worker.stage[0]] = done
        if len(of_step) < len(self.workers):
            return None
        del self.done[done.step]
        names = m.StepTimes.__struct_fields__
        times = m.StepTimes(*(sum(getattr(each.times, name) for each in of_step.values()) for name in names))
        (whole,) = (each for each in of_step.values() if isinstance(each, m.StepDone))
        return msgspec.structs.replace(whole, times=times)
