"""A simulated gateway: it does to the scheduler whatever its contract allows, and holds it to its promises."""

import random
from array import array
from collections import Counter
from dataclasses import dataclass, field, replace

from pannier.scheduler import Output, Rejected, Request, Scheduler, SchedulerConfig, Step
from pannier.wire.messages import Segment, SegmentKind

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
    """What the gateway knows of one sample of a request: what it got so far, and how it ended."""

    request: Request
    index: int
    received: list[int] = field(default_factory=list)
    ended: str | None = None


class SimulatedGateway:
    """Every action is possible at every moment: what there is nothing for does nothing. `pick` chooses among many."""

    def __init__(self, config: SchedulerConfig, num_lanes: int, capacities: list[int], seen: Counter[str]) -> None:
        self.config = config
        self.scheduler = Scheduler(config)
        self.workers: dict[int, SimulatedWorker] = {}
        self.groups: dict[int, SimulatedGroup] = {}
        self.expected: dict[int, Expected] = {}
        self.next_lane = self.next_group = 0
        self.seen = seen  # how often what is tested did happen
        for _ in range(num_lanes):
            self.add_lane()
        for num_blocks in capacities:
            self.add_group(num_blocks)

    # --- requests ---

    def add(self, shape: Request, topic: int, num_samples: int) -> None:
        """Add a request like this one, with numbers of its own; prompts of one topic begin alike."""
        first = len(self.expected)
        tokens = random.Random(topic).choices(range(VOCABULARY), k=len(shape.prompt))
        tokens[len(tokens) * 2 // 3 :] = random.Random(first).choices(range(VOCABULARY), k=-(-len(tokens) // 3))
        numbers = tuple(range(first, first + min(num_samples, self.config.max_sequences)))
        request = replace(shape, sequences=numbers, prompt=array("i", tokens), seed=first)
        self.expected |= {number: Expected(request, index) for index, number in enumerate(numbers)}
        try:
            self.scheduler.add(request)
        except Rejected as rejected:
            for number in numbers:
                self.expected[number].ended = rejected.code
            self._check_rejection(request, rejected.code)

    def _check_rejection(self, request: Request, code: str) -> None:
        reasons = {
            "unavailable": not self.groups,
            "invalid": bool(self.groups) and not self._could_hold(request),
            "overloaded": self.scheduler.num_waiting >= self.config.max_waiting,
        }
        assert reasons[code]

    def cancel(self, pick: int) -> None:
        """Cancel a sequence, now and then one that has ended."""
        if (number := self._pick_sequence(pick)) is not None:
            self.scheduler.cancel(number)
            self._ends(number, "abort")

    def finish(self, pick: int) -> None:
        """Finish a sequence that has drawn something as for a stop string, now and then one that has ended."""
        number = self._pick_sequence(pick)
        if number is not None and self.expected[number].received:
            self.scheduler.finish(number)
            self._ends(number, "stop string")

    def _ends(self, number: int, reason: str) -> None:
        """With the sequence that computes a prompt end those that wait for it."""
        request = self.expected[number].request
        unborn = [each for each in request.sequences[1:] if number == request.sequences[0] and not self._is_born(each)]
        for each in (number, *unborn):
            self.expected[each].ended = self.expected[each].ended or reason

    def _is_born(self, number: int) -> bool:
        return bool(self.expected[number].received)

    def _pick_sequence(self, pick: int) -> int | None:
        alive = [number for number, expected in self.expected.items() if expected.ended is None]
        choices = alive if alive and pick % 5 else list(self.expected)
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
            failed = {each for number in flight.sequences for each in self.expected[number].request.sequences}
            assert {output.sequence for output in outputs} <= failed
            self._take(outputs)
            assert all(self.expected[number].ended for number in flight.sequences)

    def _plan(self, lane: int) -> bool:
        self._look()
        is_doomed = any(self._is_doomed(flight) for flight in self.workers[lane].sent)
        step = self.scheduler.schedule(lane)
        self._look()
        if step is None:
            return False
        assert not is_doomed
        flight = Flight(step, self._sequences_of(step), {})
        for segment, table in flight.tables():
            flight.epochs |= {(segment.group, block): self.groups[segment.group].epochs[block] for block in table}
        self._check_step(flight)
        self.seen["steps"] += 1
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
        self.seen["samples forked"] += len(drawn) - len({sample.row for sample in flight.step.samples})
        self.seen["blocks copied"] += len(flight.step.copies)
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
        self.groups[self.next_group] = SimulatedGroup(self.scheduler.pools[self.next_group])
        self.next_group += 1

    def lose_group(self, pick: int) -> None:
        """An attention worker was lost; steps that name its group stay planned until something ends them."""
        if self.groups:
            group = list(self.groups)[pick % len(self.groups)]
            del self.groups[group]
            outputs = self.scheduler.lose_group(group)
            assert all(not self._could_hold(self.expected[output.sequence].request) for output in outputs)
            self._take(outputs)

    def _could_hold(self, request: Request) -> bool:
        stored = min(len(request.prompt) + request.max_tokens, MAX_MODEL_LEN) - 1
        tails = (len(request.sequences) - 1) * (len(request.prompt) % BLOCK_SIZE > 0)
        totals = [group.pool.total for group in self.groups.values()]
        room = max(totals, default=0) if len(request.sequences) > 1 else sum(totals)
        return -(-len(request.prompt) // BLOCK_SIZE) + tails <= room and -(-stored // BLOCK_SIZE) <= sum(totals)

    # --- what must hold ---

    def check(self) -> None:
        """The books balance, and no block that a planned step names was released."""
        self._look()
        self.scheduler.check()
        preempted = self.scheduler.take_preemptions()
        self.seen["preemptions"] += len(preempted)
        self._check_lanes()
        for worker in self.workers.values():
            for flight in worker.sent:
                for (group, block), epoch in flight.epochs.items():
                    if group in self.groups:
                        assert self.groups[group].epochs[block] == epoch, "a block was released under a planned step"

    def _check_lanes(self) -> None:
        """When every lane has been asked since something changed, none runs more than one sequence more than another.

        A sequence whose samples still share its prompt counts for all of them, and can't be divided.
        """
        scheduler = self.scheduler
        sequences = [list(lane.sequences.values()) for lane in scheduler._lanes.values()]
        if (
            scheduler._may_balance
            or not sequences
            or any(each.next_lane is not None for lane in sequences for each in lane)
        ):
            return
        widths = [[each.width for each in lane] for lane in sequences]
        heaviest, lightest = max(widths, key=sum), min(widths, key=sum)
        assert sum(heaviest) - sum(lightest) <= max([1, *heaviest]), f"lanes run {widths}"
        self.seen["lanes balanced"] += len(widths) > 1 and sum(map(sum, widths)) > 1

    def settle(self) -> None:
        """Once nothing more goes wrong every request ends, soon, and every block is free."""
        if not self.workers:
            self.add_lane()
        self._abort_doomed()
        bound = 6 * sum(len(each.request.prompt) + each.request.max_tokens for each in self.expected.values())
        for _ in range(bound):
            self.check()
            if self.scheduler.is_idle:
                break
            self.advance()
        assert self.scheduler.is_idle, "somebody starves"
        assert all(expected.ended for expected in self.expected.values())
        for pool in self.scheduler.pools.values():
            assert pool.used == 0
            assert pool.free + pool.cached == pool.total

    def _check_step(self, flight: Flight) -> None:
        """The step keeps budget and order of rows, and names nobody who is finished, waits or runs elsewhere."""
        step = flight.step
        assert 0 < len(step.token_ids) <= self.config.max_batch_tokens
        assert len(self.workers[step.lane].sent) < self.config.plan_ahead
        kinds = [(segment.kind, segment.query_position == 0) for segment in step.segments if segment.stores]
        self.seen["sequences spread"] += sum(not segment.stores for segment in step.segments)
        assert kinds == sorted(kinds), "decode rows, chunks with a past, fresh chunks"
        sequences = flight.sequences
        assert len(set(sequences)) == len(sequences)
        self._check_blocks(flight)
        elsewhere = [other for lane, worker in self.workers.items() if lane != step.lane for other in worker.sent]
        assert not any(set(sequences) & set(other.sequences) for other in elsewhere)
        self._check_choice(flight, sequences)

    def _check_blocks(self, flight: Flight) -> None:
        """No block that is written is in two tables of the step."""
        named = Counter((segment.group, block) for segment, table in flight.tables() for block in table)
        for segment, table in flight.tables():
            written = table[segment.num_stored // BLOCK_SIZE :] if segment.stores else []
            assert all(named[segment.group, block] == 1 for block in written)
        self.seen["blocks shared"] += sum(count > 1 for count in named.values())

    def _check_choice(self, flight: Flight, sequences: list[int]) -> None:
        previous_rows = {previous.row for previous in flight.step.previous}
        storing = [segment for segment in flight.step.segments if segment.stores]
        for segment, number in zip(storing, sequences, strict=True):
            expected = self.expected[number]
            assert expected.ended is None, "no rows for a finished sequence"
            assert not (expected.request.step_by_step and segment.query_start in previous_rows)
            assert segment.kind is SegmentKind.CHUNK or segment.query_position >= len(expected.request.prompt)
            self.seen["prefixes found"] += segment.kind is SegmentKind.CHUNK and self._starts_behind_a_hit(segment)

    def _starts_behind_a_hit(self, segment: Segment) -> bool:
        return 0 < segment.num_stored == segment.query_position and segment.num_stored % BLOCK_SIZE == 0

    def _sequences_of(self, step: Step) -> list[int]:
        """Whose segments these are: the one thing that a step doesn't say."""
        planned = self.scheduler._lanes[step.lane].planned[-1]
        assert planned.step is step
        return [rows.sequence.number for rows in planned.rows]

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
            tokens, reason = undisturbed(expected.request, expected.index)
            assert expected.received == tokens[: len(expected.received)]
            assert output.finish_reason == (reason if len(expected.received) == len(tokens) else None)

    def _look(self) -> None:
        for group in self.groups.values():
            group.look()

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
