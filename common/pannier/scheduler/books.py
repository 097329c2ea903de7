"""Whether a scheduler's books balance: what it counts is compared with what is there."""

from collections import Counter
from collections.abc import Container, Mapping

from pannier.scheduler.blocks import BlockPool, require
from pannier.scheduler.config import SchedulerConfig
from pannier.scheduler.lanes import Lane
from pannier.scheduler.sequence import Sequence
from pannier.scheduler.step import Rows


def check(
    config: SchedulerConfig,
    pools: Mapping[int, BlockPool],
    lanes: Mapping[int, Lane],
    sequences: Mapping[int, Sequence],
    waiting: Container[object],
    displaced: Mapping[int, Sequence],
) -> None:
    """Raise `Inconsistent` unless every block, sequence and planned step is in its one place."""
    for group, pool in pools.items():
        pool.check()
        _check_holders(group, pool, [each for each in sequences.values() if each.lies_in(group)])
    for lane in lanes.values():
        require(len(lane.planned) <= config.plan_ahead, f"lane {lane.number} has {len(lane.planned)} steps")
    running = len(displaced) + sum(len(lane.sequences) for lane in lanes.values())
    require(running <= config.max_sequences, f"{running} sequences run")
    for sequence in sequences.values():
        places: list[Container[object]] = [waiting, displaced, *(lane.sequences for lane in lanes.values())]
        _check_place(sequence, sum(sequence.number in place for place in places))
        _check_progress(sequence, _steps_of(sequence, lanes))


def _check_holders(group: int, pool: BlockPool, sequences: list[Sequence]) -> None:
    held: Counter[int] = Counter()
    for sequence in sequences:
        for of, start, stop in sequence.ranges:
            blocks = sequence.blocks[start:stop] if of == group else []
            held.update(blocks)
            require(len({*blocks}) == len(blocks), f"sequence {sequence.number} has a block twice")
        if sequence.group == group:
            held.update(sequence.spare)
            held.update([] if sequence.copied is None else [sequence.copied])
    for block in range(pool.total):
        holders = pool.num_holders(block)
        require(holders == held[block], f"block {block} of group {group}: {held[block]} holders, {holders} counted")


def _check_place(sequence: Sequence, found: int) -> None:
    """It is in exactly one place; one that leaves is in none, and stays only for the steps that name it."""
    name = f"sequence {sequence.number}"
    require(found == (0 if sequence.is_leaving else 1), f"{name} is in {found} places")
    require(not sequence.is_leaving or sequence.num_steps > 0, f"{name} is never released")


def _steps_of(sequence: Sequence, lanes: Mapping[int, Lane]) -> list[tuple[int, Rows]]:
    return [
        (planned.step.step, rows)
        for lane in lanes.values()
        for planned in lane.planned
        for rows in planned.rows
        if rows.sequence is sequence
    ]


def _check_progress(sequence: Sequence, steps: list[tuple[int, Rows]]) -> None:
    """What a sequence counts as planned is what the planned steps say."""
    name = f"sequence {sequence.number}"
    require(sequence.num_steps == len(steps), f"{name}: {sequence.num_steps} steps counted, {len(steps)} planned")
    planned = sequence.num_stored + sum(rows.num_tokens for _, rows in steps)
    require(sequence.num_planned == planned, f"{name}: {sequence.num_planned} tokens planned, {planned} in steps")
    if sequence.is_finished:
        return
    drawing = [step for step, rows in steps if rows.num_draws]
    require(sequence.num_promised == len(drawing), f"{name}: {sequence.num_promised} promised by steps {drawing}")
    require(drawing[-1:] in ([], [sequence.promised_step]), f"{name}: {sequence.promised_step} of steps {drawing}")
    length = len(sequence.tokens) + sequence.num_promised
    require(sequence.length == length, f"{name}: length {sequence.length}, {length} tokens known and promised")
    require(sequence.num_planned < sequence.length, f"{name}: {sequence.num_planned} planned of {sequence.length}")
