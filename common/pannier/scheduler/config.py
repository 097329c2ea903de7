"""The limits that the scheduler plans within."""

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

Policy: TypeAlias = Literal["fcfs", "priority"]


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits of one scheduler; raises `ValueError` naming the field when one can't work."""

    max_model_len: int
    """Tokens of prompt and output together that the model can attend over."""
    max_batch_tokens: int = 512
    """Rows in one step."""
    max_sequences: int = 64
    """Sequences admitted at a time, over all lanes."""
    max_waiting: int = 1024
    """Requests that may wait for admission; more are refused."""
    block_size: int = 64
    """Tokens in one block."""
    policy: Policy = "fcfs"
    """Who goes first, and is preempted last: who came first, or who has the smaller priority number."""
    prefix_cache: bool = True
    """Whether full blocks are kept and shared by their content."""
    token_bytes: int | None = None
    """K and V of one token over all calls and heads, to be told who doesn't fit; None if nobody knows."""
    namespace: str = ""
    """Model and dtype: what K and V depend on beside the tokens."""
    assume_stored: bool = False
    """Take all of a prompt but its last token for stored: to measure decode steps whose prompts nobody computed."""
    plan_ahead: int = 2
    """Steps of one lane that may be planned and not committed: the one that runs and those prepared behind it."""

    def __post_init__(self) -> None:
        for name in ("max_batch_tokens", "max_sequences", "max_waiting", "block_size", "plan_ahead"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.policy not in get_args(Policy):
            raise ValueError(f"policy is {self.policy!r}; it must be one of {', '.join(get_args(Policy))}")
        if self.assume_stored and self.prefix_cache:
            raise ValueError("assume_stored is on, so prefix_cache must be off: what nobody computed can't be shared")
        if self.max_model_len < 2:
            raise ValueError(f"max_model_len is {self.max_model_len}; it must be at least 2, a prompt and an output")
        if self.max_batch_tokens < self.max_sequences:
            # Then a lane's decode rows always fit in a step and leave each of its prompts at least one row.
            raise ValueError(
                f"max_batch_tokens is {self.max_batch_tokens}; it must be at least max_sequences ({self.max_sequences})"
            )
