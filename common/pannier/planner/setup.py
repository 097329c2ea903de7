"""What a simulation runs on, and how its requests behave."""

from dataclasses import dataclass
from math import inf

from pannier.scheduler import SchedulerConfig

HELD_BACK = 1024
"""Waiting requests beyond which an unbounded queue keeps the rest outside the scheduler, where they have no prompt."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Devices, limits and habits; raises `ValueError` naming the field when one can't work."""

    groups: tuple[int, ...]
    """Blocks of each group of attention workers."""
    replicas: int = 1
    """Compute devices, each of which runs all slices."""
    lanes: int = 2
    """Lanes of each replica."""
    block_size: int = 64
    """Tokens in one block."""
    max_batch_tokens: int = 2048
    """Rows in one step."""
    max_sequences: int = 1024
    """Sequences that run at a time, over all lanes."""
    max_model_len: int | None = None
    """Tokens of prompt and output together; None: what the largest group can hold."""
    max_waiting: int | None = None
    """Requests that may wait for admission, more are refused; None: all of them."""
    plan_ahead: int = 2
    """Steps of one lane that may be planned and not committed."""
    prefix_cache: bool = True
    """Whether full blocks are shared by their content."""
    one_at_a_time: bool = False
    """Whether each request comes when the one before is done, whatever its arrival."""
    patience_s: float = inf
    """Seconds after which a request without a first token is cancelled."""

    def __post_init__(self) -> None:
        for name in ("replicas", "lanes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not self.groups or min(self.groups) < 1:
            raise ValueError(f"groups is {self.groups}; there must be at least 1, each of at least 1 block")
        if not self.patience_s > 0:
            raise ValueError(f"patience_s is {self.patience_s}; it must be more than 0")
        self.scheduler_config()  # says what is wrong with the others

    def scheduler_config(self) -> SchedulerConfig:
        """The limits that the scheduler plans within."""
        return SchedulerConfig(
            # The last output token is never stored.
            max_model_len=self.max_model_len or max(self.groups) * self.block_size + 1,
            max_batch_tokens=self.max_batch_tokens,
            max_sequences=self.max_sequences,
            max_waiting=HELD_BACK if self.max_waiting is None else self.max_waiting,
            block_size=self.block_size,
            plan_ahead=self.plan_ahead,
            prefix_cache=self.prefix_cache,
        )
