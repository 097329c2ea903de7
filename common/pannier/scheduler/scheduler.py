"""Which rows run next: the only owner of sequences, block tables and queues. No I/O, no clock, no tensors.

A request waits, first come first served, until a group has blocks for all it may become; then it runs on one lane
and in one group. The gateway asks each lane for steps, commits them in order, and tells what was lost:

==============  ==================================================================================================
`schedule`      plans a lane's next step, up to `plan_ahead` of them before the first has committed
`commit`        the lane's oldest step is done: sequences advance, rows of finished ones are discarded
`drop`          all planned steps of a lane are lost, and fenced: nothing of them will be written any more
`abort`         one step and those planned behind it are lost, and nothing of them will be written any more
`fail`          a step can't be done: its sequences end with an error
==============  ==================================================================================================

What is lost is planned again, and gives the same tokens: token ids are kept here, K and V are written to the same
places, and a draw depends on seed and position only. A finished sequence keeps its blocks until the last planned step
that names it has been committed or lost, so no step reads or writes a block that became another's.
"""

from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as List
from dataclasses import dataclass, field

from pannier.scheduler.admission import refuse_impossible, refuse_unfitting
from pannier.scheduler.blocks import BlockPool, blocks_for, require
from pannier.scheduler.config import SchedulerConfig
from pannier.scheduler.sequence import Output, Rejected, Request, Sequence
from pannier.scheduler.step import Draft, Planned, Rows, Step, Unplanned
from pannier.wire.messages import Drawn


@dataclass(slots=True)
class Lane:
    """The sequences that run on one lane, and its planned steps from the oldest to the newest."""

    number: int
    sequences: dict[int, Sequence] = field(default_factory=dict)
    planned: deque[Planned] = field(default_factory=deque)


class Scheduler:
    """Plans steps; see the module for the life of a sequence."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self._pools: dict[int, BlockPool] = {}
        self._lost_groups: set[int] = set()
        self._lanes: dict[int, Lane] = {}
        self._sequences: dict[int, Sequence] = {}  # all that wait, run, or hold blocks
        self._waiting: OrderedDict[int, Sequence] = OrderedDict()
        self._displaced: OrderedDict[int, Sequence] = OrderedDict()  # hold blocks, but their lane was removed
        self._next_step = 0

    # --- groups and lanes ------------------------------------------------------------------------------------------

    @property
    def pools(self) -> dict[int, BlockPool]:
        """The block pool of each group, to look at."""
        return dict(self._pools)

    @property
    def lanes(self) -> tuple[int, ...]:
        """The lanes that can be scheduled."""
        return tuple(self._lanes)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for admission."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Admitted sequences that aren't finished."""
        return len(self._displaced) + sum(len(lane.sequences) for lane in self._lanes.values())

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
        if group in self._pools or group in self._lost_groups:
            raise ValueError(f"group {group} exists or existed; a new group needs a new number")
        self._pools[group] = BlockPool(num_blocks)

    def lose_group(self, group: int) -> list[Output]:
        """End the sequences whose K and V were lost, and those that only this group could have held.

        Lanes with planned steps that name the group get no new ones until these are aborted, dropped or committed.
        """
        if group not in self._pools:
            return []
        del self._pools[group]
        self._lost_groups.add(group)
        outputs = [
            self._end_with_error(sequence, f"the attention workers of group {group}, which held its cache, were lost")
            for sequence in self._unfinished()
            if sequence.group == group
        ]
        return outputs + [
            self._end_with_error(sequence, f"group {group} was lost, and no other has enough blocks for it")
            for sequence in list(self._waiting.values())
            if not self._could_hold(sequence)
        ]

    def add_lane(self, lane: int) -> None:
        """A lane that `schedule` may be asked for; new sequences go to the emptiest lane."""
        if lane in self._lanes:
            raise ValueError(f"lane {lane} exists; lanes are {sorted(self._lanes)}")
        self._lanes[lane] = Lane(lane)

    def remove_lane(self, lane: int) -> None:
        """Drop the lane's steps (fence them first) and move its sequences, with their caches, to other lanes."""
        self.drop(lane)
        removed = self._lanes.pop(lane)
        for sequence in removed.sequences.values():
            sequence.lane = None
            self._displaced[sequence.number] = sequence

    # --- requests --------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request; raises `Rejected` when the queue is full or the request could never run."""
        if request.sequence in self._sequences:
            raise ValueError(f"sequence {request.sequence} exists; numbers are used once")
        refuse_impossible(request, self.config)
        max_outputs = min(request.max_tokens, self.config.max_model_len - len(request.prompt))
        sequence = Sequence(request, max_outputs, array("i", request.prompt))
        refuse_unfitting(sequence, self._pools, self.config.block_size)
        if len(self._waiting) >= self.config.max_waiting:
            raise Rejected("overloaded", None, f"{len(self._waiting)} requests are waiting already; try again later")
        self._sequences[sequence.number] = sequence
        self._waiting[sequence.number] = sequence

    def cancel(self, sequence: int) -> None:
        """Forget a sequence, at any moment; unknown and finished ones are fine."""
        self._finish(sequence, "abort", keep=None)

    def finish(self, sequence: int, keep: int) -> None:
        """End a sequence behind its first `keep` output tokens (a stop string); unknown and finished ones are fine."""
        self._finish(sequence, "stop", keep)

    def _finish(self, number: int, reason: str, keep: int | None) -> None:
        sequence = self._sequences.get(number)
        if sequence is None or sequence.is_finished:
            return
        if keep is not None:
            sequence.keep(keep)
        sequence.finish_reason = reason
        self._retire(sequence)

    # --- steps -----------------------------------------------------------------------------------------------------

    def schedule(self, lane: int) -> Step | None:
        """Plan the lane's next step; None when it has nothing to do or enough planned.

        Requests are admitted here, to whichever lane is the emptiest: after an `add` or a `commit` every lane may
        have something to do.
        """
        self._admit()
        track = self._lane(lane)
        if len(track.planned) >= self.config.plan_ahead or self._is_doomed(track):
            return None
        rows = self._pick(track)
        if not rows:
            return None
        draft = Draft(self._next_step, lane, self.config.block_size)
        self._next_step += 1
        for each in rows:
            draft.add(each)
        step = draft.finish()
        track.planned.append(Planned(step, rows, frozenset(segment.group for segment in step.segments)))
        return step

    def commit(self, step: int, drawn: List[Drawn]) -> list[Output]:
        """The lane's oldest planned step is done, and this is what its samples drew, in their order.

        Raises `Unplanned`, and nothing has changed, when that is not so.
        """
        track = self._track_of(step)
        if track is None or track.planned[0].step.step != step:
            raise Unplanned(f"step {step} can't commit: it is not the oldest planned step of a lane")
        _compare(track.planned[0].step, drawn)
        answers = iter(drawn)
        outputs = []
        for sequence, count, draws in track.planned.popleft().rows:
            sequence.commit(count, draws)
            answer = next(answers) if draws else None
            if sequence.is_finished:
                self._release(sequence)
            elif answer is not None:
                outputs.append(self._advance(sequence, answer))
        return outputs

    def lane_of(self, step: int) -> int | None:
        """The lane that the step is planned on; None once it has committed or is lost."""
        track = self._track_of(step)
        return None if track is None else track.number

    def drop(self, lane: int) -> list[int]:
        """All planned steps of the lane are lost; returns their numbers. Only after their fence was acknowledged."""
        return self._lose_steps(self._lane(lane), 0)

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
        return [self._end_with_error(rows.sequence, reason) for rows in failed.rows if not rows.sequence.is_finished]

    # --- admission and choice --------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Give lanes to displaced sequences, then lanes and blocks to waiting ones, strictly in their order."""
        while self._lanes and self._displaced:
            self._start(self._displaced.popitem(last=False)[1])
        while self._lanes and self._waiting and self.num_running < self.config.max_sequences:
            sequence = next(iter(self._waiting.values()))
            num_blocks = blocks_for(sequence.max_stored, self.config.block_size)
            group = max(self._pools, key=lambda group: self._pools[group].free)
            if self._pools[group].free < num_blocks:
                return  # nobody overtakes: the blocks it waits for would never come together
            del self._waiting[sequence.number]
            sequence.group = group
            sequence.blocks = self._pools[group].allocate(num_blocks)
            self._start(sequence)

    def _start(self, sequence: Sequence) -> None:
        emptiest = min(self._lanes.values(), key=lambda lane: (len(lane.sequences), lane.number))
        emptiest.sequences[sequence.number] = sequence
        sequence.lane = emptiest.number

    def _pick(self, lane: Lane) -> list[Rows]:
        """Every decode row, then prompts within the token budget; rows that the attention workers answer go first."""
        decodes: list[Rows] = []
        prompts: list[Sequence] = []
        for sequence in lane.sequences.values():
            if not sequence.is_ready:
                continue
            if sequence.is_decoding:
                decodes.append(Rows(sequence, 1, draws=True))
            else:
                prompts.append(sequence)
        chunks = list(_chunks(prompts, self.config.max_batch_tokens - len(decodes)))
        chunks.sort(key=lambda rows: rows.sequence.num_planned == 0)
        return decodes + chunks

    def _could_hold(self, sequence: Sequence) -> bool:
        num_blocks = blocks_for(sequence.max_stored, self.config.block_size)
        return any(num_blocks <= pool.total for pool in self._pools.values())

    def _is_doomed(self, lane: Lane) -> bool:
        """Whether planned steps of the lane name a lost group, so that what is planned behind them would be lost."""
        return any(not planned.groups.isdisjoint(self._lost_groups) for planned in lane.planned)

    # --- advance, end, release -------------------------------------------------------------------------------------

    def _advance(self, sequence: Sequence, drawn: Drawn) -> Output:
        sequence.append(drawn.token)
        if sequence.is_finished:
            self._retire(sequence)
        return Output(sequence.number, drawn, sequence.finish_reason)

    def _end_with_error(self, sequence: Sequence, reason: str) -> Output:
        sequence.finish_reason = "error"
        self._retire(sequence)
        return Output(sequence.number, None, "error", reason)

    def _retire(self, sequence: Sequence) -> None:
        """Take a finished sequence out of queue or lane; it is gone when no planned step names it."""
        self._waiting.pop(sequence.number, None)
        self._displaced.pop(sequence.number, None)
        if sequence.lane is not None:
            del self._lanes[sequence.lane].sequences[sequence.number]
            sequence.lane = None
        self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        """Return the blocks of a finished sequence, once the last planned step that names it is over."""
        if not sequence.is_finished or sequence.num_steps > 0:
            return
        del self._sequences[sequence.number]
        if sequence.group in self._pools:
            self._pools[sequence.group].release(sequence.blocks)

    def _lose_steps(self, lane: Lane, first: int) -> list[int]:
        """Undo the lane's planned steps from index `first` on, the newest first."""
        lost = []
        while len(lane.planned) > first:
            planned = lane.planned.pop()
            for sequence, count, draws in planned.rows:
                sequence.undo(count, draws)
                self._release(sequence)
            lost.append(planned.step.step)
        return lost[::-1]

    # --- finding things --------------------------------------------------------------------------------------------

    def _unfinished(self) -> list[Sequence]:
        return [sequence for sequence in self._sequences.values() if not sequence.is_finished]

    def _lane(self, lane: int) -> Lane:
        if lane not in self._lanes:
            raise ValueError(f"lane {lane} is unknown; lanes are {sorted(self._lanes)}")
        return self._lanes[lane]

    def _track_of(self, step: int) -> Lane | None:
        for lane in self._lanes.values():
            if any(planned.step.step == step for planned in lane.planned):
                return lane
        return None

    # --- invariants ------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise `Inconsistent` unless the books balance; they do between any two calls."""
        for group, pool in self._pools.items():
            pool.check()
            held = [block for s in self._sequences.values() if s.group == group for block in s.blocks]
            require(len(held) == len(set(held)) == pool.used, f"group {group}: {len(held)} held, {pool.used} used")
        require(self.num_running <= self.config.max_sequences, f"{self.num_running} sequences run")
        for lane in self._lanes.values():
            require(len(lane.planned) <= self.config.plan_ahead, f"lane {lane.number} has {len(lane.planned)} steps")
        for sequence in self._sequences.values():
            self._check_place(sequence)
            self._check_progress(sequence)

    def _check_place(self, sequence: Sequence) -> None:
        """A sequence is in exactly one place, and a finished one stays only for the steps that name it."""
        places = [self._waiting, self._displaced, *(lane.sequences for lane in self._lanes.values())]
        found = sum(sequence.number in place for place in places)
        require(found == (0 if sequence.is_finished else 1), f"sequence {sequence.number} is in {found} places")
        require(not sequence.is_finished or sequence.num_steps > 0, f"sequence {sequence.number} is never released")

    def _check_progress(self, sequence: Sequence) -> None:
        """What a sequence counts as planned is what the planned steps say."""
        rows = [
            (planned.step.step, each)
            for lane in self._lanes.values()
            for planned in lane.planned
            for each in planned.rows
            if each.sequence is sequence
        ]
        name = f"sequence {sequence.number}"
        require(sequence.num_steps == len(rows), f"{name}: {sequence.num_steps} steps counted, {len(rows)} planned")
        planned = sequence.num_stored + sum(each.num_tokens for _, each in rows)
        require(sequence.num_planned == planned, f"{name}: {sequence.num_planned} tokens planned, {planned} in steps")
        drawing = [step for step, each in rows if each.draws]
        require([p.step for p in sequence.promised] == drawing, f"{name}: {sequence.promised} from steps {drawing}")
        if not sequence.is_finished:
            require(sequence.num_unplanned >= 1, f"{name}: {sequence.num_planned} tokens planned, more than it has")


def _chunks(prompts: Iterable[Sequence], budget: int) -> Iterator[Rows]:
    """As much of each prompt as the budget leaves, in the order of admission."""
    for sequence in prompts:
        if budget == 0:
            return
        count = min(budget, sequence.num_unplanned)
        yield Rows(sequence, count, draws=count == sequence.num_unplanned)
        budget -= count


def _compare(step: Step, drawn: List[Drawn]) -> None:
    """Raise `Unplanned` unless these are the draws of the step's samples, in order, and could be tokens."""
    expected, got = [sample.sequence for sample in step.samples], [each.sequence for each in drawn]
    if expected != got:
        raise Unplanned(f"step {step.step} drew for the sequences {got}; its samples are of {expected}")
    strange = next((each.token for each in drawn if not 0 <= each.token < 1 << 31), None)
    if strange is not None:
        raise Unplanned(f"step {step.step} drew {strange}, which is no token")
