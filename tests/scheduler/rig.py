"""A small scheduler to put questions to."""

from typing import Any

from pannier.scheduler import Scheduler, SchedulerConfig


def scheduler_with(*, lanes: int = 1, blocks: tuple[int, ...] = (100,), **limits: Any) -> Scheduler:
    """A scheduler over blocks of 4 tokens."""
    config: dict[str, Any] = {"max_model_len": 200, "max_batch_tokens": 64, "block_size": 4} | limits
    scheduler = Scheduler(SchedulerConfig(**config))
    for lane in range(lanes):
        scheduler.add_lane(lane)
    for group, num_blocks in enumerate(blocks):
        scheduler.add_group(group, num_blocks)
    return scheduler
