"""A simulated gateway: it does to the scheduler whatever its contract allows, and holds it to its promises."""

import random
from collections import Counter
from dataclasses import dataclass, field, replace

from pannier.scheduler import Output, Rejected, Request, Scheduler, SchedulerConfig
from pannier.wire.messages import SegmentKind

from .simulation import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    VOCABULARY,
    Flight,
    SimulatedGroup,
    SimulatedWorker,
    undisturbed,
)


@dataclass
class Expected:
    """What the gateway knows of one request: what it got so far, and how it ended."""

    request: Request
    received: list[int] = field(default_factory=list)
    ended: str | None = None
    group: int | None = None


class SimulatedGateway:
    """Every action is possible at every moment: what there is nothing for does nothing. `pick` chooses among many."""

    def __init__(self, config: SchedulerConfig, num_lanes: int, capacities: list[int], seen: Counter[str]) -> None:
        self.config = config
        self.scheduler = Scheduler(config)
        self.workers: dict[int, SimulatedWorker] = {}
        self.groups: dict[int, SimulatedGroup] = {}
        self.expected: dict[int, Expected] = {}
        self.owners: dict[tuple[int, int], int] = {}  # (group, first block of a table) -> sequence
        self.next_lane = self.next_group = 0
        self.seen = seen  # how often what is tested did happen
        for _ in range(num_lanes):
            self.add_lane()
        for num_blocks in capacities:
            self.add_group(num_blocks)

    # --- requests ---

    def add(self, shape: Request) -> None:
        """Add a request like this one, with a number and a prompt of its own."""
        number = len(self.expected)
        tokens = random.Random(number).choices(range(VOCABULARY), k=len(shape.prompt) - 1)
        request = replace(shape, sequence=number, prompt=(number, *tokens), seed=number)
        self.expected[number] = Expected(request)
        try:
            self.scheduler.add(request)
        except Rejected as rejected:
            self.expected[number].ended = rejected.code
            self._check_rejection(request, rejected.code)

    def _check_rejection(self, request: Request, code: str) -> None:
        needed = len(request.prompt) + min(request.max_tokens, MAX_MODEL_LEN - len(request.prompt)) - 1
        capacities = [len(group.epochs) * BLOCK_SIZE for group in self.groups.values()]
        reasons = {
            "unavailable": not capacities,
            "invalid": bool(capacities) and needed > max(capacities),
            "overloaded": self.scheduler.num_waiting == self.config.max_waiting,
        }
        assert reasons[code]

    def cancel(self, pick: int) -> None:
        """Cancel a request, now and then one that has ended."""
        if expected := self._pick_request(pick):
            self.scheduler.cancel(expected.request.sequence)
            expected.ended = expected.ended or "abort"

    def finish(self, pick: int, keep: int) -> None:
        """Finish a request as for a stop string, now and then one that has ended."""
        if expected := self._pick_request(pick):
            self.scheduler.finish(expected.request.sequence, keep % (len(expected.received) + 1))
            expected.ended = expected.ended or "stop string"

    def _pick_request(self, pick: int) -> Expected | None:
        alive = [expected for expected in self.expected.values() if expected.ended is None]
        choices = alive if alive and pick % 5 else list(self.expected.values())
        return choices[pick % len(choices)] if choices else None

    # --- steps ---

    def plan(self) -> None:
        """Plan all that can be planned."""
        for lane in self.workers:
            while self._plan(lane):
                pass

    def run(self, pick: int, share: float) -> None:
        """Let a lane run its next step, or begin it."""
        if self.workers:
            self._run_next(self._pick_lane(pick), share)

    def commit(self, pick: int) -> None:
        """Commit a lane's oldest step if it has run."""
        if self.workers:
            self._commit_oldest(self._pick_lane(pick))

    def advance(self) -> None:
        """What goes on when nothing goes wrong."""
        self.plan()
        for lane in self.workers:
            while self._run_next(lane):
                pass
            self._commit_oldest(lane)

    def drop(self, pick: int) -> None:
        """Lose all steps of a lane, and all that its worker remembers."""
        if self.workers:
            lane = self._pick_lane(pick)
            assert self.scheduler.drop(lane) == self._forget(self.workers[lane], 0)
            self.workers[lane] = SimulatedWorker()

    def abort(self, pick: int) -> None:
        """Lose one step and those behind it."""
        if picked := self._pick_flight(pick):
            worker, index = picked
            assert self.scheduler.abort(worker.sent[index].step.step) == self._forget(worker, index)

    def fail(self, pick: int) -> None:
        """A step that can't be done ends its sequences, and no others."""
        if picked := self._pick_flight(pick):
            worker, index = picked
            flight = worker.sent[index]
            self._forget(worker, index)
            outputs = self.scheduler.fail(flight.step.step, "broken")
            sequences = self._sequences_of(flight)
            assert {output.sequence for output in outputs} <= set(sequences)
            self._take(outputs)
            assert all(self.expected[number].ended for number in sequences)

    def _plan(self, lane: int) -> bool:
        self._look()  # blocks change hands only here: see what was released before it may be another's
        is_doomed = any(self._is_doomed(flight) for flight in self.workers[lane].sent)
        step = self.scheduler.schedule(lane)
        self._look()
        if step is None:
            return False
        assert not is_doomed
        flight = Flight(step, {})
        for segment, table in flight.tables():
            flight.epochs |= {(segment.group, block): self.groups[segment.group].epochs[block] for block in table}
        self._check_step(flight)
        self.workers[lane].sent.append(flight)
        return True

    def _run_next(self, lane: int, share: float = 1.0) -> bool:
        worker = self.workers[lane]
        flight = next((flight for flight in worker.sent if flight.drawn is None), None)
        if flight is None or self._is_doomed(flight):
            return False
        worker.run(flight, self.groups, int(share * len(flight.step.segments)))
        return flight.drawn is not None

    def _commit_oldest(self, lane: int) -> bool:
        sent = self.workers[lane].sent
        if not sent or sent[0].drawn is None:
            return False
        flight = sent.popleft()
        drawn = flight.drawn or []
        self.seen["tokens promised"] += len(flight.step.previous)
        self.seen["rows discarded"] += sum(self.expected[each.sequence].ended is not None for each in drawn)
        self._take(self.scheduler.commit(flight.step.step, drawn))
        return True

    def _forget(self, worker: SimulatedWorker, index: int) -> list[int]:
        lost = [worker.sent.pop().step.step for _ in range(len(worker.sent) - index)]
        self.seen["steps lost"] += len(lost)
        return lost[::-1]

    # --- lanes and groups ---

    def add_lane(self) -> None:
        """A compute worker brings a lane."""
        self.scheduler.add_lane(self.next_lane)
        self.workers[self.next_lane] = SimulatedWorker()
        self.next_lane += 1

    def remove_lane(self, pick: int) -> None:
        """A compute worker was lost."""
        if self.workers:
            lane = self._pick_lane(pick)
            self.scheduler.remove_lane(lane)
            del self.workers[lane]

    def add_group(self, num_blocks: int) -> None:
        """Attention workers form a group."""
        self.scheduler.add_group(self.next_group, num_blocks)
        self.groups[self.next_group] = SimulatedGroup(num_blocks)
        self.next_group += 1

    def lose_group(self, pick: int) -> None:
        """An attention worker was lost; steps that name its group stay planned until something ends them."""
        if self.groups:
            group = list(self.groups)[pick % len(self.groups)]
            del self.groups[group]
            outputs = self.scheduler.lose_group(group)
            assert all(self.expected[output.sequence].group in (group, None) for output in outputs)
            self._take(outputs)
            assert all(expected.ended for expected in self.expected.values() if expected.group == group)

    # --- what must hold ---

    def check(self) -> None:
        """The books balance, and no block that a planned step names was released."""
        self._look()
        self.scheduler.check()
        for worker in self.workers.values():
            for flight in worker.sent:
                for (group, block), epoch in flight.epochs.items():
                    if group in self.groups:
                        assert self.groups[group].epochs[block] == epoch, "a block was released under a planned step"

    def settle(self) -> None:
        """Once nothing more goes wrong every request ends, soon, and every block is free."""
        if not self.workers:
            self.add_lane()
        self._abort_doomed()
        bound = 3 * sum(len(each.request.prompt) + each.request.max_tokens for each in self.expected.values())
        for _ in range(bound):
            self.check()
            if self.scheduler.is_idle:
                break
            self.advance()
        assert self.scheduler.is_idle, "somebody starves"
        assert all(expected.ended for expected in self.expected.values())
        for pool in self.scheduler.pools.values():
            assert (pool.free, pool.used, pool.cached) == (pool.total, 0, 0)

    def _check_step(self, flight: Flight) -> None:
        """The step keeps budget and order of rows, and names nobody who is finished, waits or runs elsewhere."""
        step = flight.step
        assert 0 < len(step.token_ids) <= self.config.max_batch_tokens
        assert len(self.workers[step.lane].sent) < self.config.plan_ahead
        kinds = [(segment.kind, segment.num_stored == 0) for segment in step.segments]
        assert kinds == sorted(kinds), "decode rows, chunks with a past, fresh chunks"
        sequences = self._sequences_of(flight)
        assert len(set(sequences)) == len(sequences)
        assert len(flight.epochs) == len(step.blocks), "no block is in two tables"
        elsewhere = [other for lane, worker in self.workers.items() if lane != step.lane for other in worker.sent]
        assert not any(set(sequences) & set(self._sequences_of(other)) for other in elsewhere)
        self._check_choice(flight, sequences)

    def _check_choice(self, flight: Flight, sequences: list[int]) -> None:
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

    def _sequences_of(self, flight: Flight) -> list[int]:
        """Whose segments these are: a sequence shows itself in its first token, and then has its first block."""
        numbers = []
        for segment, table in flight.tables():
            if segment.query_position == 0:
                self.owners[segment.group, table[0]] = flight.step.token_ids[segment.query_start]
            numbers.append(self.owners[segment.group, table[0]])
        return numbers

    def _take(self, outputs: list[Output]) -> None:
        """Outputs go only to requests that haven't ended, and each is the next token of the undisturbed text."""
        for output in outputs:
            expected = self.expected[output.sequence]
            assert expected.ended is None
            expected.ended = output.finish_reason
            self.seen[f"ended with {output.finish_reason}"] += 1
            if output.drawn is None:
                assert output.finish_reason == "error"
                assert output.reason
                continue
            expected.received.append(output.drawn.token)
            tokens, reason = undisturbed(expected.request)
            assert expected.received == tokens[: len(expected.received)]
            assert output.finish_reason == (reason if len(expected.received) == len(tokens) else None)

    def _look(self) -> None:
        for number, group in self.groups.items():
            group.look(self.scheduler.pools[number])

    # --- choosing ---

    def _pick_lane(self, pick: int) -> int:
        return list(self.workers)[pick % len(self.workers)]

    def _pick_flight(self, pick: int) -> tuple[SimulatedWorker, int] | None:
        """A step to lose. A worker's answers arrive in order, so what it has done before that is committed first."""
        flights = [(lane, flight) for lane, worker in self.workers.items() for flight in worker.sent]
        if not flights:
            return None
        lane, chosen = flights[pick % len(flights)]
        sent = self.workers[lane].sent
        while sent[0] is not chosen and self._commit_oldest(lane):
            pass
        return self.workers[lane], sent.index(chosen)

    def _is_doomed(self, flight: Flight) -> bool:
        return any(segment.group not in self.groups for segment in flight.step.segments)

    def _abort_doomed(self) -> None:
        for worker in self.workers.values():
            doomed = [index for index, flight in enumerate(worker.sent) if self._is_doomed(flight)]
            if doomed:
                self.scheduler.abort(worker.sent[doomed[0]].step.step)
                self._forget(worker, doomed[0])
