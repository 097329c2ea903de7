"""Which requests could never run, said before they wait."""

from collections.abc import Mapping

from pannier.scheduler.blocks import BlockPool, blocks_for
from pannier.scheduler.config import SchedulerConfig
from pannier.scheduler.sequence import Rejected, Request


def refuse_impossible(request: Request, config: SchedulerConfig) -> None:
    """Raise `Rejected` for an empty or too long prompt, no output, or more samples than may run."""
    if request.max_tokens < 1:
        raise Rejected("invalid", "max_tokens", f"max_tokens is {request.max_tokens}; it must be at least 1")
    length, longest = len(request.prompt), config.max_model_len - 1
    if not 1 <= length <= longest:
        raise Rejected("invalid", "prompt", f"the prompt has {length} tokens; 1 to {longest} are possible")
    if not 1 <= len(request.sequences) <= config.max_sequences:
        reason = f"n is {len(request.sequences)}; 1 to {config.max_sequences} sequences may run at a time"
        raise Rejected("invalid", "n", reason)


def refuse_unfitting(
    request: Request, max_stored: int, pools: Mapping[int, BlockPool], config: SchedulerConfig
) -> None:
    """Raise `Rejected`, with what there is, when the groups could not hold one of its sequences if they were empty."""
    if not pools:
        raise Rejected("unavailable", None, "no attention workers are ready")
    if not fits(request, max_stored, pools, config.block_size):
        field = "max_tokens" if fits(request, len(request.prompt), pools, config.block_size) else "prompt"
        raise Rejected("invalid", field, _budget(request, max_stored, pools, config))


def fits(request: Request, max_stored: int, pools: Mapping[int, BlockPool], block_size: int) -> bool:
    """Whether a sequence of the request can have so many tokens: in one group, or spread over several.

    A prompt of several samples must be in one, whose blocks they share.
    """
    totals = [pool.total for pool in pools.values()]
    to_start = blocks_to_start(request, len(request.prompt), block_size)
    room = max(totals, default=0) if len(request.sequences) > 1 else sum(totals)
    return to_start <= room and blocks_for(max_stored, block_size) <= sum(totals)


def blocks_to_start(request: Request, num_tokens: int, block_size: int) -> int:
    """Blocks for these tokens, and for the tail of a prompt that each further sample must have for itself."""
    has_tail = len(request.prompt) % block_size > 0
    return blocks_for(num_tokens, block_size) + (len(request.sequences) - 1) * has_tail


def _budget(request: Request, max_stored: int, pools: Mapping[int, BlockPool], config: SchedulerConfig) -> str:
    num_outputs, size = max_stored + 1 - len(request.prompt), config.block_size
    needed = max(blocks_for(max_stored, size), blocks_to_start(request, len(request.prompt), size))
    per_token = "" if config.token_bytes is None else f", each token {config.token_bytes} bytes of K and V"
    totals = {str(group): pool.total for group, pool in pools.items()}
    if len(totals) > 1:
        totals["all"] = sum(totals.values())
    rows = [f"{group:>5}  {total:>6}  {total * size + 1:>7}" for group, total in totals.items()]
    return "\n".join(
        [
            f"a prompt of {len(request.prompt)} and {num_outputs} output tokens need {needed} blocks of "
            f"{size} tokens{per_token}, more than the groups of attention workers have:",
            "group  blocks  longest",
            *rows,
        ]
    )
