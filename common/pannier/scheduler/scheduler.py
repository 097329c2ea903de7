"""Which rows run next: the only owner of sequences, block tables and queues. No I/O, no clock, no tensors.

A request waits by rank until a group has blocks for what it is so far; then it runs on one lane and in one group, and
takes blocks as it grows. The gateway asks each lane for steps, commits them in order, and tells what was lost:

==============  ==================================================================================================
`schedule`      plans a lane's next step, up to `plan_ahead` of them before the first has committed
`commit`        the lane's oldest step is done: sequences advance, rows of finished ones are discarded
`drop`          all planned steps of a lane are lost, and fenced: nothing of them will be written any more
`abort`         one step and those planned behind it are lost, and nothing of them will be written any more
`fail`          a step can't be done: its sequences end with an error
==============  ==================================================================================================

What is lost is planned again, and gives the same tokens: token ids are kept here, K and V are written to the same
places, and a draw depends on seed, sample and position only. When blocks run out the sequence of the last rank is
preempted: it waits again, and what it had stored is computed again from its tokens. A sequence that ends or is
preempted keeps its blocks until the last planned step that names it has been committed or lost, so no step reads or
writes a block that became another's.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as List
from dataclasses import replace
from heapq import heappop, heappush
from math import inf

from pannier.scheduler import books, lanes
from pannier.scheduler.admission import refuse_impossible, refuse_unfitting
from pannier.scheduler.blocks import BlockPool, require
from pannier.scheduler.config import SchedulerConfig
from pannier.scheduler.content import Contents, root
from pannier.scheduler.lanes import Lane
from pannier.scheduler.memory import Memory
from pannier.scheduler.sequence import Output, Rejected, Request, Sequence
from pannier.scheduler.step import Draft, Planned, Rows, Step, Unplanned, state_of
from pannier.scheduler.waiting import WaitingQueue
from pannier.wire.messages import Drawn, Scored


class Scheduler:
    """Plans steps; see the module for the life of a sequence."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self._block_size = config.block_size
        self._memory = Memory(config)
        self._lanes: dict[int, Lane] = {}
        self._sequences: dict[int, Sequence] = {}  # all that wait, run, or hold blocks
        self._unborn: dict[int, Sequence] = {}  # further samples -> the sequence that computes their prompt
        self._waiting = WaitingQueue()
        self._displaced: OrderedDict[int, Sequence] = OrderedDict()  # hold blocks, but their lane was removed
        self._deadlines: list[tuple[float, tuple[int, ...]]] = []
        self._preempted: list[int] = []
        self._stalled: set[int] = set()  # sit out, since they need a block that isn't there
        self._leaving: dict[int, Sequence] = {}  # finished or preempted, and named by planned steps
        self._num_slots = 0
        self._num_arrived = 0
        self._next_step = 0
        self._may_admit = self._may_balance = False  # whether anything has changed since it last was impossible

    # --- groups and lanes ------------------------------------------------------------------------------------------

    @property
    def pools(self) -> dict[int, BlockPool]:
        """The block pool of each group, to look at."""
        return dict(self._memory.pools)

    @property
    def lanes(self) -> tuple[int, ...]:
        """The lanes that can be scheduled."""
        return tuple(self._lanes)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for admission, and preempted sequences."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences that run, those counted that will share a prompt which is still computed."""
        return self._num_slots

    @property
    def under_way(self) -> dict[int, int]:
        """The oldest planned step of each lane that has one."""
        return {lane.number: lane.planned[0].step.step for lane in self._lanes.values() if lane.planned}

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits, runs or holds a block."""
        return not self._sequences

    def add_group(self, group: int, num_blocks: int) -> None:
        """Blocks of a new group of attention workers. A group's number is never used again."""
        self._memory.add_group(group, num_blocks)
        self._may_admit = True

    def lose_group(self, group: int) -> list[Output]:
        """K and V of a group are lost: its sequences are computed again elsewhere.

        What only this group had room for ends, also where it runs in another: it would outgrow that.

        Lanes with planned steps that name the group get no new ones until these are aborted, dropped or committed.
        """
        if group not in self._memory.pools:
            return []
        self._memory.lose_group(group)
        for sequence in self._running():
            if sequence.lies_in(group):
                self._preempt(sequence)
        reason = f"group {group} of attention workers was lost, and the others have not enough blocks for it"
        return [
            output
            for sequence in list(self._sequences.values())
            if not sequence.is_finished and not self._memory.could_hold(sequence)
            for output in self._end_with_error(sequence, reason)
        ]

    def add_lane(self, lane: int) -> None:
        """A lane that `schedule` may be asked for; new sequences go to the lightest lane."""
        if lane in self._lanes:
            raise ValueError(f"lane {lane} exists; lanes are {sorted(self._lanes)}")
        self._lanes[lane] = Lane(lane)
        self._may_admit = self._may_balance = True

    def remove_lane(self, lane: int) -> None:
        """Drop the lane's steps (fence them first) and move its sequences, with their caches, to other lanes."""
        self.drop(lane)
        removed = self._lanes.pop(lane)
        for sequence in removed.sequences.values():
            sequence.lane = sequence.next_lane = None
            self._displaced[sequence.number] = sequence
        for sequence in self._running():
            if sequence.next_lane == lane:
                sequence.next_lane = None
        self._may_admit = self._may_balance = True

    # --- requests --------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request; raises `Rejected` when the queue is full or the request could never run or draw."""
        for number in request.sequences:
            if number in self._sequences or number in self._unborn:
                raise ValueError(f"sequence {number} exists; numbers are used once")
        refuse_impossible(request, self.config)
        max_length = min(len(request.prompt) + request.max_tokens, self.config.max_model_len)
        refuse_unfitting(request, max_length - 1, self._memory.pools, self.config)
        if len(self._waiting) >= self.config.max_waiting:
            raise Rejected("overloaded", None, f"{len(self._waiting)} requests are waiting already; try again later")
        mask = request.mask(array("i"))
        self._num_arrived += 1
        first, *others = request.sequences
        sequence = self._sequence(request, first, 0, self._num_arrived, max_length)
        sequence.width, sequence.mask = len(request.sequences), mask
        self._unborn |= dict.fromkeys(others, sequence)
        self._wait(sequence)
        if request.deadline < inf:
            heappush(self._deadlines, (request.deadline, request.sequences))

    def cancel(self, sequence: int) -> None:
        """Forget a sequence, at any moment; unknown and finished ones are fine."""
        self._finish(sequence, "abort")

    def finish(self, sequence: int) -> None:
        """End a sequence as if its last token were an end token (a stop string); unknown and finished ones are fine."""
        self._finish(sequence, "stop")

    def expire(self, now: float) -> list[Output]:
        """End the requests whose deadline is over."""
        outputs = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, numbers = heappop(self._deadlines)
            for number in numbers:
                sequence = self._sequences.get(number)
                if sequence is not None and not sequence.is_finished:
                    outputs += self._end_with_error(sequence, "its deadline is over")
        return outputs

    def take_preemptions(self) -> list[int]:
        """The sequences that were preempted since the last call."""
        taken, self._preempted = self._preempted, []
        return taken

    def _sequence(self, request: Request, number: int, index: int, arrival: int, max_length: int) -> Sequence:
        rank = (request.priority if self.config.policy == "priority" else 0, arrival, index)
        tokens, contents = array("i", request.prompt), Contents(root(self.config.namespace, request.salt))
        sequence = Sequence(
            request=request,
            number=number,
            index=index,
            arrival=arrival,
            rank=rank,
            max_length=max_length,
            tokens=tokens,
            contents=contents,
        )
        self._sequences[number] = sequence
        return sequence

    def _finish(self, number: int, reason: str) -> None:
        self._unborn.pop(number, None)
        sequence = self._sequences.get(number)
        if sequence is not None and not sequence.is_finished:
            sequence.finish_reason = reason
            self._retire(sequence)

    # --- steps -----------------------------------------------------------------------------------------------------

    def schedule(self, lane: int) -> Step | None:
        """Plan the lane's next step; None when it has nothing to do or enough planned.

        Requests are admitted here, to whichever lane is the lightest: after an `add` or a `commit` every lane may
        have something to do.
        """
        track = self._lane(lane)
        self._admit()
        self._balance()
        if len(track.planned) >= self.config.plan_ahead or self._is_doomed(track):
            return None
        draft = Draft(self._next_step, lane, self.config.block_size)
        self._pick(track, draft)
        if not draft.segments:
            return None
        self._next_step += 1
        planned = draft.finish()
        track.planned.append(planned)
        return planned.step

    def step_with_states(self, step: int) -> Step:
        """The step again, with the states that its draws need. Raises `Unplanned` unless its lane owes it next."""
        planned = self._oldest(step)
        of_number = {
            number: rows.sequence
            for rows in planned.rows
            for number in (rows.sequence.number, *rows.sequence.request.sequences[: rows.num_draws])
        }
        wanted = [sample.sequence for sample in planned.step.samples if sample.state_version]
        return replace(planned.step, states=tuple(state_of(of_number[number], number) for number in wanted))

    def commit(self, step: int, drawn: List[Drawn], scored: List[Scored] = ()) -> list[Output]:
        """The lane's oldest planned step is done: what its samples drew, and its scores, in their order.

        A sequence whose constraint allows nothing behind what it drew ends with an error.
        Raises `Unplanned`, and nothing has changed, when that is not so.
        """
        planned = self._oldest(step)
        _compare(planned.step, drawn, scored)
        track = self._lanes[planned.step.lane]
        track.planned.popleft()
        outputs = [self._score(each) for each in scored if each.sequence in self._sequences]
        for sequence, answer in zip(planned.decodes, drawn, strict=False):  # their draws come first
            self._advance(sequence, 1, (answer,), outputs)
        place = len(planned.decodes)
        for sequence, num_tokens, num_draws in planned.chunks:
            self._advance(sequence, num_tokens, drawn[place : place + num_draws], outputs)
            place += num_draws
        if planned.step.masks:
            outputs += self._constrain(outputs)
        return outputs

    def lane_of(self, step: int) -> int | None:
        """The lane that the step is planned on; None once it has committed or is lost."""
        track = self._track_of(step)
        return None if track is None else track.number

    def sequences_of(self, step: int) -> list[int]:
        """Whose rows a planned step has; none once it has committed or is lost."""
        track = self._track_of(step)
        planned = () if track is None else track.planned
        return [rows.sequence.number for each in planned if each.step.step == step for rows in each.rows]

    def drop(self, lane: int) -> list[int]:
        """All planned steps of the lane are lost; returns their numbers. Only after their fence was acknowledged."""
        track = self._lane(lane)
        lost = self._lose_steps(track, 0)
        for sequence in track.sequences.values():
            sequence.told_at = None  # the worker's states end with its session
        return lost

    def abort(self, step: int) -> list[int]:
        """The step and its lane's later ones are lost; returns their numbers, none when it isn't planned any more.

        Only after the compute worker has said that nothing of any of them will be written.
        """
        track = self._track_of(step)
        if track is None:
            return []
        return self._lose_steps(track, [planned.step.step for planned in track.planned].index(step))

    def fail(self, step: int, reason: str) -> list[Output]:
        """The step can't be done and would fail again: end its sequences, abort it and the lane's later ones."""
        track = self._track_of(step)
        if track is None:
            return []
        failed = next(planned for planned in track.planned if planned.step.step == step)
        self.abort(step)
        sequences = [rows.sequence for rows in failed.rows if not rows.sequence.is_finished]
        return [output for sequence in sequences for output in self._end_with_error(sequence, reason)]

    # --- admission -------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Give lanes to displaced sequences, then lanes and blocks to waiting ones, strictly in their order."""
        if not self._may_admit or not self._lanes:
            return
        while self._displaced:
            self._start(self._displaced.popitem(last=False)[1])
        if self._stalled:
            return  # the next blocks are for those that run
        while (sequence := self._waiting.head()) is not None and self._has_slots(sequence):
            if not self._memory.place(sequence):
                break  # nobody overtakes: the blocks it waits for would never come together
            self._waiting.leave(sequence)
            if sequence.num_cached < 0:  # later it finds what it has computed itself
                sequence.num_cached = sequence.num_stored
            self._num_slots += sequence.width
            self._start(sequence)
        self._may_admit = False

    def _has_slots(self, sequence: Sequence) -> bool:
        return self._num_slots + sequence.width <= self.config.max_sequences

    # --- lanes -----------------------------------------------------------------------------------------------------

    def _start(self, sequence: Sequence) -> None:
        lane = lanes.lightest(self._lanes.values())
        lane.sequences[sequence.number] = sequence
        sequence.lane = lane.number
        lane.load += lanes.weight(sequence)
        self._may_balance = True

    def _stop(self, sequence: Sequence) -> None:
        """Take a sequence that runs off its lane."""
        if sequence.lane is not None:
            del self._lanes[sequence.lane].sequences[sequence.number]
        elif self._displaced.pop(sequence.number, None) is None:
            return  # it doesn't run
        sequence.lane = sequence.next_lane = None
        self._stalled.discard(sequence.number)
        self._num_slots -= sequence.width
        self._may_admit = self._may_balance = True

    def _balance(self) -> None:
        """Let one sequence change from the heaviest lane to the lightest, where that evens them."""
        if not self._may_balance:
            return
        self._may_balance = False
        lanes.count_loads(self._lanes.values())
        change = lanes.unbalanced(self._lanes.values())
        if change is not None:
            sequence, lane = change
            sequence.next_lane = lane.number
            self._may_balance = True  # there may be more to even
            if sequence.num_steps == 0:
                self._settle(sequence)

    def _is_doomed(self, lane: Lane) -> bool:
        """Whether planned steps of the lane name a lost group, so that what is planned behind them would be lost."""
        return any(not planned.groups.isdisjoint(self._memory.lost_groups) for planned in lane.planned)

    # --- choice of rows --------------------------------------------------------------------------------------------

    def _pick(self, lane: Lane, draft: Draft) -> None:
        """Every decode row, then prompts within the token budget; rows that the attention workers answer go first."""
        newest = lane.planned[-1].step.step if lane.planned else -1
        growing, prompts = draft.add_ready(lane.sequences.values(), newest)
        victims: dict[int, list[Sequence]] = {}
        for sequence in sorted(growing, key=_rank):
            if sequence.lane == lane.number and self._has_room(sequence, victims):  # not preempted just now
                draft.add_decode(sequence)
        if prompts:
            waiting = sorted((each for each in prompts if each.lane == lane.number), key=_rank)
            chunks = list(_chunks(waiting, self.config.max_batch_tokens - len(draft.decodes), self._block_size))
            for chunk in sorted(chunks, key=lambda chunk: chunk.sequence.num_planned == 0):
                draft.add_chunk(chunk)

    # --- blocks ----------------------------------------------------------------------------------------------------

    def _has_room(self, sequence: Sequence, victims: dict[int, list[Sequence]]) -> bool:
        """Whether its next token has a place, for which it may need one more block."""
        return sequence.num_planned < len(sequence.blocks) * self._block_size or self._grow(sequence, victims)

    def _grow(self, sequence: Sequence, victims: dict[int, list[Sequence]]) -> bool:
        """One more block for a sequence whose blocks are full; False when it has to sit out.

        It does so while steps are under way that name it or whoever gives back blocks: what they end may be enough.
        `victims`: what `_last_in` keeps while one step is planned.
        """
        while not self._memory.grow(sequence):
            group = self._memory.group_of(sequence)
            if sequence.num_steps or any(each.lies_in(group) for each in self._leaving.values()):
                self._stalled.add(sequence.number)
                return False
            last = self._last_in(group, victims)
            if last is sequence and self._memory.grow_elsewhere(sequence):
                break
            self._preempt(last)
            if last is sequence:
                return False
        self._stalled.discard(sequence.number)
        return True

    def _last_in(self, group: int, victims: dict[int, list[Sequence]]) -> Sequence:
        """Who of the last rank runs in the group. They are sorted once for each step: thousands may have to go."""
        if group not in victims:
            victims[group] = sorted((each for each in self._running() if each.lies_in(group)), key=_rank)
        ranked = victims[group]
        while ranked[-1].is_leaving or not ranked[-1].lies_in(group):  # preempted since
            ranked.pop()
        return ranked[-1]

    def _preempt(self, sequence: Sequence) -> None:
        """Let it wait again, once the planned steps that name it are over."""
        self._stop(sequence)
        sequence.is_preempted = True
        self._preempted.append(sequence.number)
        self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """It gives its blocks back as soon as no planned step names it."""
        if sequence.num_steps == 0:
            self._settle(sequence)
        else:
            self._leaving[sequence.number] = sequence

    def _settle(self, sequence: Sequence) -> None:
        """No planned step names it any more: what waited for that can happen."""
        if sequence.is_leaving:
            self._leaving.pop(sequence.number, None)
            self._memory.release(sequence)
            self._may_admit = True
            if sequence.is_finished:
                del self._sequences[sequence.number]
            else:
                sequence.forget()
                self._wait(sequence)
        elif sequence.next_lane is not None:
            assert sequence.lane is not None
            del self._lanes[sequence.lane].sequences[sequence.number]
            self._lanes[sequence.next_lane].sequences[sequence.number] = sequence
            sequence.lane, sequence.next_lane, sequence.told_at = sequence.next_lane, None, None

    def _wait(self, sequence: Sequence) -> None:
        self._waiting.push(sequence)
        self._may_admit = True

    # --- advance and end -------------------------------------------------------------------------------------------

    def _advance(self, sequence: Sequence, num_tokens: int, drawn: List[Drawn], outputs: list[Output]) -> None:
        """A committed step has stored so many tokens of a sequence, and drawn these."""
        sequence.num_steps -= 1
        before = sequence.num_stored
        sequence.num_stored = stored = before + num_tokens
        if before // self._block_size != stored // self._block_size or sequence.copied is not None:
            self._memory.filled(sequence, before)
        if drawn and sequence.finish_reason is None:
            first = drawn[0]
            sequence.append(first.token)
            reason = sequence.finish_reason
            outputs.append(Output(sequence.number, first, reason, None, (), sequence.num_cached))
            if len(drawn) > 1:
                self._fork(sequence, drawn[1:], outputs)
            if reason is not None:
                self._retire(sequence)
                return
        if sequence.num_steps == 0:
            self._settle(sequence)

    def _fork(self, parent: Sequence, drawn: List[Drawn], outputs: list[Output]) -> None:
        """The prompt is computed: from here on its samples are sequences of their own."""
        is_running = not parent.is_preempted
        told_lane, parent_width, parent.width = parent.lane, parent.width, 1
        if is_running:
            self._num_slots -= parent_width - 1
            self._may_balance = True  # fewer may run than it counted for
        for index, each in enumerate(drawn, start=1):
            if self._unborn.pop(each.sequence, None) is None:
                continue  # cancelled
            child = self._sequence(parent.request, each.sequence, index, parent.arrival, parent.max_length)
            child.num_cached, child.num_scored = parent.num_cached, parent.num_prompt - 1
            child.promise(0, 0)  # kept at once
            child.append(each.token)
            outputs.append(Output(child.number, each, child.finish_reason, None, (), child.num_cached))
            if child.is_finished:
                del self._sequences[child.number]
            elif is_running:
                self._memory.share(parent, child)
                self._num_slots += 1
                self._start(child)
                child.told_at = parent.told_at if child.lane == told_lane else None
            else:
                self._wait(child)
        if is_running:
            self._memory.release_spare(parent)  # of samples that were cancelled

    def _constrain(self, outputs: Iterable[Output]) -> list[Output]:
        """See what may come behind the tokens of these; who has come to a dead end is done."""
        ends: list[Output] = []
        for output in outputs:
            sequence = self._sequences.get(output.sequence)
            if sequence is None or sequence.is_finished or output.drawn is None:
                continue
            try:
                sequence.mask = sequence.request.mask(sequence.tokens[sequence.num_prompt :])
            except Rejected as rejected:
                ends += self._end_with_error(sequence, rejected.reason)
        return ends

    def _score(self, scored: Scored) -> Output:
        sequence = self._sequences[scored.sequence]
        sequence.num_scored = scored.position + len(scored.tokens) - 1
        return Output(scored.sequence, None, None, None, scored.tokens)

    def _end_with_error(self, sequence: Sequence, reason: str) -> list[Output]:
        """End a sequence, and with it the samples that wait for its prompt."""
        unborn = [number for number in sequence.request.sequences if self._unborn.get(number) is sequence]
        sequence.finish_reason = "error"
        self._retire(sequence)
        return [Output(number, None, "error", reason) for number in (sequence.number, *unborn)]

    def _retire(self, sequence: Sequence) -> None:
        """Take a finished sequence out of queue or lane; it is gone when no planned step names it."""
        self._waiting.leave(sequence)
        self._stop(sequence)
        if sequence.width > 1:
            for number in sequence.request.sequences[1:]:
                self._unborn.pop(number, None)
        self._leave(sequence)

    def _lose_steps(self, lane: Lane, first: int) -> list[int]:
        """Undo the lane's planned steps from index `first` on, the newest first."""
        lost = []
        while len(lane.planned) > first:
            planned = lane.planned.pop()
            number = planned.step.step
            for sequence, num_tokens, num_draws in planned.rows:
                sequence.undo(number, num_tokens, num_draws > 0)
                if num_draws and sequence.num_promised and sequence.finish_reason is None:
                    sequence.recall(*_newest_promise(sequence, lane))
                if sequence.num_steps == 0:
                    self._settle(sequence)
            lost.append(number)
        return lost[::-1]

    # --- finding things --------------------------------------------------------------------------------------------

    def _running(self) -> list[Sequence]:
        """All that run."""
        on_lanes = [each for lane in self._lanes.values() for each in lane.sequences.values()]
        return on_lanes + list(self._displaced.values())

    def _lane(self, lane: int) -> Lane:
        if lane not in self._lanes:
            raise ValueError(f"lane {lane} is unknown; lanes are {sorted(self._lanes)}")
        return self._lanes[lane]

    def _track_of(self, step: int) -> Lane | None:
        for lane in self._lanes.values():
            if any(planned.step.step == step for planned in lane.planned):
                return lane
        return None

    def _oldest(self, step: int) -> Planned:
        """The planned step, which must be its lane's oldest. Raises `Unplanned`."""
        for lane in self._lanes.values():
            if lane.planned and lane.planned[0].step.step == step:
                return lane.planned[0]
        raise Unplanned(f"step {step} is not the oldest planned step of a lane")

    def check(self) -> None:
        """Raise `Inconsistent` unless the books balance; they do between any two calls."""
        books.check(self.config, self._memory.pools, self._lanes, self._sequences, self._waiting, self._displaced)
        require(self._num_slots == sum(each.width for each in self._running()), "slots differ")
        leaving = {number for number, each in self._sequences.items() if each.is_leaving}
        require(leaving == self._leaving.keys(), f"{sorted(self._leaving)} leave, and {sorted(leaving)} are to")
        require(all(each in self._sequences.values() for each in self._unborn.values()), "an orphan is unborn")


def _newest_promise(sequence: Sequence, lane: Lane) -> tuple[int, int]:
    """The newest of the lane's planned steps that draws for the sequence, and its sample that does."""
    return next(
        (planned.step.step, place)
        for planned in reversed(lane.planned)
        for place, sample in enumerate(planned.step.samples)
        if sample.sequence == sequence.number
    )


def _rank(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.rank


def _chunks(prompts: Iterable[Sequence], budget: int, block_size: int) -> Iterator[Rows]:
    """As much of each prompt as the budget leaves, in the order of rank."""
    for sequence in prompts:
        if budget == 0:
            return
        left = sequence.length - sequence.num_planned
        count = min(budget, left, _room_in_part(sequence, block_size))
        yield Rows(sequence, count, sequence.width if count == left else 0)
        budget -= count


def _room_in_part(sequence: Sequence, block_size: int) -> int:
    """Tokens until the rows of a chunk would have to be stored in another group."""
    ends = (stop * block_size for _, _, stop in sequence.ranges)
    return next(end for end in ends if end > sequence.num_planned) - sequence.num_planned


def _compare(step: Step, drawn: List[Drawn], scored: List[Scored]) -> None:
    """Raise `Unplanned` unless these are the draws and scores of the step, in order, and the draws could be tokens."""
    expected, got = [sample.sequence for sample in step.samples], [each.sequence for each in drawn]
    if expected != got:
        raise Unplanned(f"step {step.step} drew for the sequences {got}; its samples are of {expected}")
    strange = next((each.token for each in drawn if not 0 <= each.token < 1 << 31), None)
    if strange is not None:
        raise Unplanned(f"step {step.step} drew {strange}, which is no token")
    wanted = [(score.sequence, score.position, score.num_rows) for score in step.scores]
    given = [(score.sequence, score.position, len(score.tokens)) for score in scored]
    if wanted != given:
        raise Unplanned(f"step {step.step} scored {given}; it was asked for {wanted}")
