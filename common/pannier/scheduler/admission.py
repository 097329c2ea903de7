"""Which requests could never run, said before they wait."""

from collections.abc import Mapping

from pannier.scheduler.blocks import BlockPool, blocks_for
from pannier.scheduler.config import SchedulerConfig
from pannier.scheduler.sequence import Rejected, Request, Sequence


def refuse_impossible(request: Request, config: SchedulerConfig) -> None:
    """Raise `Rejected` for an empty or too long prompt, or when no output is asked for."""
    if request.max_tokens < 1:
        raise Rejected("invalid", "max_tokens", f"max_tokens is {request.max_tokens}; it must be at least 1")
    length, longest = len(request.prompt), config.max_model_len - 1
    if not 1 <= length <= longest:
        raise Rejected("invalid", "prompt", f"the prompt has {length} tokens; 1 to {longest} are possible")


def refuse_unfitting(sequence: Sequence, pools: Mapping[int, BlockPool], block_size: int) -> None:
    """Raise `Rejected`, with what there is, when no group could hold the sequence even if it were empty."""
    if not pools:
        raise Rejected("unavailable", None, "no attention workers are ready")
    largest = max(pool.total for pool in pools.values())
    needed = blocks_for(sequence.max_stored, block_size)
    if needed > largest:
        param = "prompt" if blocks_for(sequence.num_prompt, block_size) > largest else "max_tokens"
        raise Rejected("invalid", param, _budget(sequence, needed, pools, block_size))


def _budget(sequence: Sequence, needed: int, pools: Mapping[int, BlockPool], block_size: int) -> str:
    rows = [f"{group:>5}  {pool.total:>6}  {pool.total * block_size + 1:>7}" for group, pool in pools.items()]
    return "\n".join(
        [
            f"a prompt of {sequence.num_prompt} and {sequence.max_outputs} output tokens need {needed} blocks of "
            f"{block_size} tokens, more than any group of attention workers has:",
            "group  blocks  longest",
            *rows,
        ]
    )
