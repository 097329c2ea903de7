from array import array

import pytest

from pannier.scheduler import Request, Scheduler, SchedulerConfig
from pannier.wire.messages import Drawn, SegmentKind


def test_a_prompt_counts_as_stored_but_for_its_last_token() -> None:
    """Its first step is that token alone over the past; then it decodes, in blocks that were given for all of it."""
    scheduler = Scheduler(
        SchedulerConfig(
            max_model_len=100,
            max_batch_tokens=8,
            max_sequences=4,
            block_size=4,
            prefix_cache=False,
            assume_stored=True,
        )
    )
    scheduler.add_group(0, 20)
    scheduler.add_lane(0)
    scheduler.add(Request(sequences=(0,), prompt=array("i", range(30)), max_tokens=3))
    seen = []
    while (step := scheduler.schedule(0)) is not None:
        segment = step.segments[0]
        seen.append((segment.kind, segment.num_queries, segment.num_stored, segment.num_blocks))
        scheduler.commit(step.step, [Drawn(sample.sequence, 50, None, ()) for sample in step.samples])
    assert seen == [
        (SegmentKind.CHUNK, 1, 29, 8),
        (SegmentKind.DECODE, 1, 30, 8),
        (SegmentKind.DECODE, 1, 31, 8),
    ]
    assert scheduler.pools[0].used == 0


def test_what_nobody_computed_is_never_shared() -> None:
    with pytest.raises(ValueError, match="prefix_cache must be off"):
        SchedulerConfig(max_model_len=100, assume_stored=True)
