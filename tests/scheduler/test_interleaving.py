"""Whatever happens and in whatever order: each request's tokens are those of a run in which nothing else happened."""

import os
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pannier.scheduler import Output, Rejected, Request, Scheduler, SchedulerConfig
from pannier.wire.messages import SegmentKind

from .simulation import (
    BLOCK_SIZE,
    EOS,
    MAX_MODEL_LEN,
    VOCABULARY,
    Flight,
    SimulatedGroup,
    SimulatedWorker,
    undisturbed,
)

CONFIGS = st.builds(
    SchedulerConfig,
    max_model_len=st.just(MAX_MODEL_LEN),
    max_batch_tokens=st.integers(5, 16),
    max_sequences=st.integers(1, 5),
    max_waiting=st.integers(1, 8),
    block_size=st.just(BLOCK_SIZE),
    plan_ahead=st.sampled_from([1, 2, 2, 3]),
)

REQUESTS = st.lists(
    st.builds(
        Request,
        sequence=st.just(0),  # its number, and the prompt's tokens, are chosen when it is added
        prompt=st.integers(1, 24).map(lambda length: (0,) * length),
        max_tokens=st.integers(1, 12),
        eos_tokens=st.sampled_from([frozenset(), EOS]),
        step_by_step=st.booleans(),
    ),
    min_size=1,
    max_size=6,
)

CAPACITIES = st.integers(4, 32)


@dataclass
class Expected:
    """What the gateway knows of one request: what it got so far, and how it ended."""

    request: Request
    received: list[int] = field(default_factory=list)
    ended: str | None = None
    group: int | None = None


class Interleaving(RuleBasedStateMachine):
    """The gateway's part, driven by hypothesis: it may do anything that its contract allows, at any moment."""

    seen: ClassVar[Counter[str]] = Counter()
    """Over all runs: how often what is tested did happen."""

    @initialize(
        config=CONFIGS,
        num_lanes=st.integers(1, 3),
        capacities=st.lists(CAPACITIES, min_size=1, max_size=3),
        requests=REQUESTS,
    )
    def start(self, config: SchedulerConfig, num_lanes: int, capacities: list[int], requests: list[Request]) -> None:
        self.config = config
        self.scheduler = Scheduler(config)
        self.workers: dict[int, SimulatedWorker] = {}
        self.groups: dict[int, SimulatedGroup] = {}
        self.expected: dict[int, Expected] = {}
        self.owners: dict[tuple[int, int], int] = {}  # (group, first block of a table) -> sequence
        self.next_lane = self.next_group = 0
        for _ in range(num_lanes):
            self.add_lane()
        for num_blocks in capacities:
            self.add_group(num_blocks)
        self.add(requests)

    # --- requests ---

    @rule(requests=REQUESTS)
    def add(self, requests: list[Request]) -> None:
        for request in requests:
            number = len(self.expected)
            tokens = random.Random(number).choices(range(VOCABULARY), k=len(request.prompt) - 1)
            self.add_one(replace(request, sequence=number, prompt=(number, *tokens), seed=number))

    def add_one(self, request: Request) -> None:
        number = request.sequence
        self.expected[number] = Expected(request)
        try:
            self.scheduler.add(request)
        except Rejected as rejected:
            self.expected[number].ended = rejected.code
            self.check_rejection(request, rejected.code)

    def check_rejection(self, request: Request, code: str) -> None:
        needed = len(request.prompt) + min(request.max_tokens, MAX_MODEL_LEN - len(request.prompt)) - 1
        capacities = [len(group.epochs) * BLOCK_SIZE for group in self.groups.values()]
        reasons = {
            "unavailable": not capacities,
            "invalid": bool(capacities) and needed > max(capacities),
            "overloaded": self.scheduler.num_waiting == self.config.max_waiting,
        }
        assert reasons[code]

    @precondition(lambda self: self.expected)
    @rule(pick=st.integers(0, 10**6))
    def cancel(self, pick: int) -> None:
        expected = self.pick_request(pick)
        self.scheduler.cancel(expected.request.sequence)
        expected.ended = expected.ended or "abort"

    @precondition(lambda self: self.expected)
    @rule(pick=st.integers(0, 10**6), keep=st.integers(0, 100))
    def finish(self, pick: int, keep: int) -> None:
        expected = self.pick_request(pick)
        self.scheduler.finish(expected.request.sequence, keep % (len(expected.received) + 1))
        expected.ended = expected.ended or "stop string"

    def pick_request(self, pick: int) -> Expected:
        """Mostly one that goes on, now and then one that has ended."""
        alive = [expected for expected in self.expected.values() if expected.ended is None]
        choices = alive if alive and pick % 5 else list(self.expected.values())
        return choices[pick % len(choices)]

    # --- steps ---

    @rule()
    def schedule(self) -> None:
        for lane in self.workers:
            while self.plan(lane):
                pass

    @precondition(lambda self: self.workers)
    @rule(pick=st.integers(0, 5), share=st.sampled_from([0.5, 1.0, 1.0]))
    def run(self, pick: int, share: float) -> None:
        self.run_oldest(self.pick_lane(pick), share)

    @precondition(lambda self: self.workers)
    @rule(pick=st.integers(0, 5))
    def commit(self, pick: int) -> None:
        self.commit_oldest(self.pick_lane(pick))

    @rule(rounds=st.integers(1, 4))
    def advance(self, rounds: int) -> None:
        """What goes on when nothing goes wrong."""
        for _ in range(rounds):
            for lane in list(self.workers):
                while self.plan(lane):
                    pass
                while self.run_oldest(lane):
                    pass
                self.commit_oldest(lane)

    def plan(self, lane: int) -> bool:
        is_doomed = any(self.is_doomed(flight) for flight in self.workers[lane].sent)
        self.look()  # blocks change hands only here: see what was released before it may be another's
        step = self.scheduler.schedule(lane)
        self.look()
        if step is None:
            return False
        assert not is_doomed
        flight = Flight(step, {})
        for segment, table in flight.tables():
            flight.epochs |= {(segment.group, block): self.groups[segment.group].epochs[block] for block in table}
        self.check_step(flight)
        self.workers[lane].sent.append(flight)
        return True

    def run_oldest(self, lane: int, share: float = 1.0) -> bool:
        worker = self.workers[lane]
        flight = next((flight for flight in worker.sent if flight.drawn is None), None)
        if flight is None or self.is_doomed(flight):
            return False
        worker.run(flight, self.groups, max(1, int(share * len(flight.step.segments))))
        return flight.drawn is not None

    def commit_oldest(self, lane: int) -> bool:
        sent = self.workers[lane].sent
        if not sent or sent[0].drawn is None:
            return False
        flight = sent.popleft()
        drawn = flight.drawn or []
        self.seen["tokens promised"] += len(flight.step.previous)
        self.seen["rows discarded"] += sum(self.expected[each.sequence].ended is not None for each in drawn)
        self.take(self.scheduler.commit(flight.step.step, drawn))
        return True

    @precondition(lambda self: self.workers)
    @rule(pick=st.integers(0, 5))
    def drop(self, pick: int) -> None:
        lane = self.pick_lane(pick)
        assert self.scheduler.drop(lane) == self.forget(self.workers[lane], 0)
        self.workers[lane] = SimulatedWorker()

    @precondition(lambda self: any(worker.sent for worker in self.workers.values()))
    @rule(pick=st.integers(0, 10))
    def abort(self, pick: int) -> None:
        worker, index = self.pick_flight(pick)
        assert self.scheduler.abort(worker.sent[index].step.step) == self.forget(worker, index)

    def fail(self, pick: int) -> None:
        worker, index = self.pick_flight(pick)
        flight = worker.sent[index]
        self.forget(worker, index)
        outputs = self.scheduler.fail(flight.step.step, "broken")
        assert {output.sequence for output in outputs} <= set(self.sequences_of(flight))
        self.take(outputs, error_allowed=True)

    def forget(self, worker: SimulatedWorker, index: int) -> list[int]:
        lost = [worker.sent.pop().step.step for _ in range(len(worker.sent) - index)]
        self.seen["steps lost"] += len(lost)
        return lost[::-1]

    # --- lanes and groups ---

    @rule(
        change=st.sampled_from(["fail", "add_lane", "remove_lane", "add_group", "lose_group"]),
        pick=st.integers(0, 10),
        num_blocks=st.integers(3, 24),
    )
    def change(self, change: str, pick: int, num_blocks: int) -> None:
        """What happens seldom; in one rule, so that it is drawn seldom."""
        match change:
            case "fail" if any(worker.sent for worker in self.workers.values()):
                self.fail(pick)
            case "add_lane" if len(self.workers) < 4:
                self.add_lane()
            case "remove_lane" if self.workers:
                self.remove_lane(self.pick_lane(pick))
            case "add_group" if len(self.groups) < 4:
                self.add_group(num_blocks)
            case "lose_group" if self.groups:
                self.lose_group(list(self.groups)[pick % len(self.groups)])

    def add_lane(self) -> None:
        self.scheduler.add_lane(self.next_lane)
        self.workers[self.next_lane] = SimulatedWorker()
        self.next_lane += 1

    def remove_lane(self, lane: int) -> None:
        self.scheduler.remove_lane(lane)
        del self.workers[lane]

    def add_group(self, num_blocks: int) -> None:
        self.scheduler.add_group(self.next_group, num_blocks)
        self.groups[self.next_group] = SimulatedGroup(num_blocks)
        self.next_group += 1

    def lose_group(self, group: int) -> None:
        del self.groups[group]
        outputs = self.scheduler.lose_group(group)
        for output in outputs:
            assert self.expected[output.sequence].group in (group, None)
        self.take(outputs, error_allowed=True)
        assert all(expected.ended for expected in self.expected.values() if expected.group == group)

    # --- what must hold ---

    def check_step(self, flight: Flight) -> None:
        """The step keeps budget and order of rows, and names nobody who is finished, waits or runs elsewhere."""
        step = flight.step
        assert 0 < len(step.token_ids) <= self.config.max_batch_tokens
        assert len(self.workers[step.lane].sent) < self.config.plan_ahead
        kinds = [(segment.kind, segment.num_stored == 0) for segment in step.segments]
        assert kinds == sorted(kinds), "decode rows, chunks with a past, fresh chunks"
        sequences = self.sequences_of(flight)
        assert len(set(sequences)) == len(sequences)
        assert len(set(flight.epochs)) == len(step.blocks), "no block is in two tables"
        elsewhere = [other for lane, worker in self.workers.items() if lane != step.lane for other in worker.sent]
        assert not any(set(sequences) & set(self.sequences_of(other)) for other in elsewhere)
        self.check_choice(flight, sequences)

    def check_choice(self, flight: Flight, sequences: list[int]) -> None:
        previous_rows = {previous.row for previous in flight.step.previous}
        alive = [number for number, expected in self.expected.items() if expected.ended is None]
        waiting = set(alive[len(alive) - self.scheduler.num_waiting :])
        for segment, number in zip(flight.step.segments, sequences, strict=True):
            expected = self.expected[number]
            assert expected.ended is None, "no rows for a finished sequence"
            assert number not in waiting, "first come, first served"
            assert not (expected.request.step_by_step and segment.query_start in previous_rows)
            assert expected.group in (None, segment.group), "a group is for life"
            assert segment.kind is SegmentKind.CHUNK or segment.num_stored >= len(expected.request.prompt)
            expected.group = segment.group

    def sequences_of(self, flight: Flight) -> list[int]:
        numbers = []
        for segment, table in flight.tables():
            if segment.query_position == 0:
                self.owners[segment.group, table[0]] = flight.step.token_ids[segment.query_start]
            numbers.append(self.owners[segment.group, table[0]])
        return numbers

    def take(self, outputs: list[Output], error_allowed: bool = False) -> None:
        """Outputs go only to requests that haven't ended, and each is the next token of the undisturbed text."""
        for output in outputs:
            expected = self.expected[output.sequence]
            assert expected.ended is None
            expected.ended = output.finish_reason
            self.seen[f"ended with {output.finish_reason}"] += 1
            if output.drawn is None:
                assert error_allowed
                assert output.finish_reason == "error"
                assert output.reason
                continue
            expected.received.append(output.drawn.token)
            tokens, reason = undisturbed(expected.request)
            assert expected.received == tokens[: len(expected.received)]
            assert output.finish_reason == (reason if len(expected.received) == len(tokens) else None)

    @invariant()
    def the_books_balance(self) -> None:
        if hasattr(self, "scheduler"):
            self.look()
            self.scheduler.check()
            for worker in self.workers.values():
                for flight in worker.sent:
                    self.check_blocks(flight)

    def check_blocks(self, flight: Flight) -> None:
        for (group, block), epoch in flight.epochs.items():
            if group in self.groups:
                assert self.groups[group].epochs[block] == epoch, "a block was released under a planned step"

    def look(self) -> None:
        for number, group in self.groups.items():
            group.look(self.scheduler, number)

    def teardown(self) -> None:
        """Once nothing more goes wrong every request ends, soon, and every block is free."""
        if not hasattr(self, "scheduler"):
            return
        if not self.workers:
            self.add_lane()
        self.abort_doomed()
        bound = 3 * sum(len(each.request.prompt) + each.request.max_tokens for each in self.expected.values())
        for _ in range(bound):
            self.the_books_balance()
            if self.scheduler.is_idle:
                break
            self.advance(1)
        assert self.scheduler.is_idle, "somebody starves"
        assert all(expected.ended for expected in self.expected.values())
        for pool in self.scheduler.pools.values():
            assert (pool.free, pool.used, pool.cached) == (pool.total, 0, 0)

    # --- choosing ---

    def pick_lane(self, pick: int) -> int:
        return list(self.workers)[pick % len(self.workers)]

    def pick_flight(self, pick: int) -> tuple[SimulatedWorker, int]:
        """A step to lose. A worker's answers arrive in order, so what it has done before that is committed first."""
        flights = [(lane, flight) for lane, worker in self.workers.items() for flight in worker.sent]
        lane, chosen = flights[pick % len(flights)]
        sent = self.workers[lane].sent
        while sent[0] is not chosen and self.commit_oldest(lane):
            pass
        return self.workers[lane], sent.index(chosen)

    def is_doomed(self, flight: Flight) -> bool:
        return any(segment.group not in self.groups for segment in flight.step.segments)

    def abort_doomed(self) -> None:
        for worker in self.workers.values():
            for index, flight in enumerate(worker.sent):
                if self.is_doomed(flight):
                    self.scheduler.abort(flight.step.step)
                    self.forget(worker, index)
                    break


def run(max_examples: int, steps: int, *, derandomize: bool) -> None:
    """Run the machine, and see that what it is there for did happen."""
    Interleaving.seen.clear()
    limits = settings(
        max_examples=max_examples,
        stateful_step_count=steps,
        derandomize=derandomize,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(Interleaving, settings=limits)
    happenings = ["tokens promised", "rows discarded", "steps lost"]
    endings = [f"ended with {reason}" for reason in ("stop", "length", "error")]
    assert all(Interleaving.seen[each] > max_examples // 10 for each in happenings + endings), Interleaving.seen


@pytest.mark.timeout(60)
def test_tokens_are_those_of_an_undisturbed_run() -> None:
    """Each request gets its own text, whatever is cancelled, lost, failed, added or removed around it."""
    run(max_examples=100, steps=40, derandomize=True)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_tokens_are_those_of_an_undisturbed_run_at_length() -> None:
    """The same over more and longer random runs; PANNIER_EXAMPLES sets how many."""
    run(max_examples=int(os.environ.get("PANNIER_EXAMPLES", "300")), steps=80, derandomize=False)
