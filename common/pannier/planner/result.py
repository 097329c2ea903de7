"""What a simulation found."""

from array import array
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from pannier.planner.distribution import Distribution


@dataclass(frozen=True, kw_only=True)
class SimulationResult:
    """Figures of one simulation; seconds are simulated ones."""

    requests: int
    """Requests that got all their output."""
    refused: Mapping[str, int]
    """Code of the refusal -> requests."""
    given_up: int
    """Requests whose patience ended before their first token came."""
    seconds: float
    """From the first arrival until the last request has left and no step runs."""
    prompt_tokens: int
    """Of the requests that got a token."""
    cached_tokens: int
    """Prompt tokens among them whose K and V were there already."""
    output_tokens: int
    """All that were drawn."""
    preemptions: int
    steps: int

    ttft_s: Distribution
    """Time to first token: from arrival to the end of the step that draws it."""
    tpot_s: Distribution
    """Time per output token: seconds a token from the first to the last, of each request that got two or more."""
    queueing_s: Distribution
    """From arrival until blocks were given to it."""
    batch: Distribution
    """Sequences in a step."""
    step_rows: Distribution
    """Query tokens in a step."""

    peak_running: int
    peak_waiting: int
    blocks: int
    """Of all groups."""
    peak_blocks: int
    """Most in use at a time (of n groups, looked at every n-th time that something changes)."""
    mean_blocks: float
    """In use, over time."""
    compute_busy: float
    """Share of the time that the compute replicas worked, their mean."""
    attention_busy: float
    """Share of the time that the groups worked, their mean."""

    @property
    def requests_per_s(self) -> float:
        """Requests done in a second."""
        return self._a_second(self.requests)

    @property
    def prompt_tokens_per_s(self) -> float:
        """Prompt tokens in a second, cached ones too."""
        return self._a_second(self.prompt_tokens)

    @property
    def output_tokens_per_s(self) -> float:
        """Tokens drawn in a second."""
        return self._a_second(self.output_tokens)

    @property
    def hit_rate(self) -> float:
        """Prompt tokens that were found in the cache, of all."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def _a_second(self, count: int) -> float:
        return count / self.seconds if self.seconds else 0.0


@dataclass
class Recorder:
    """Gathers the figures while time passes: a few numbers a request, counts by size for steps, nothing a token."""

    requests: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    given_up: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    ttft_s: "array[float]" = field(default_factory=lambda: array("d"))
    tpot_s: "array[float]" = field(default_factory=lambda: array("d"))
    queueing_s: "array[float]" = field(default_factory=lambda: array("d"))
    batches: Counter[int] = field(default_factory=Counter)
    rows: Counter[int] = field(default_factory=Counter)
    peak_running: int = 0
    peak_waiting: int = 0
    peak_blocks: int = 0
    block_seconds: float = 0.0
    last_look_s: float = 0.0
    last_blocks: int = 0

    def saw_step(self, sequences: int, rows: int) -> None:
        """A step began."""
        self.batches[sequences] += 1
        self.rows[rows] += 1

    def saw_queue(self, running: int, waiting: int) -> None:
        """So many run and wait now."""
        self.peak_running = max(self.peak_running, running)
        self.peak_waiting = max(self.peak_waiting, waiting)

    def saw_blocks(self, now: float, used: int) -> None:
        """So many blocks are in use from now on."""
        self.block_seconds += self.last_blocks * (now - self.last_look_s)
        self.last_look_s, self.last_blocks = now, used
        self.peak_blocks = max(self.peak_blocks, used)

    def result(self, seconds: float, blocks: int, compute_busy: float, attention_busy: float) -> SimulationResult:
        """Everything, when it is over."""
        return SimulationResult(
            requests=self.requests,
            refused=dict(self.refused),
            given_up=self.given_up,
            seconds=seconds,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            output_tokens=self.output_tokens,
            preemptions=self.preemptions,
            steps=self.batches.total(),
            ttft_s=Distribution.of(self.ttft_s),
            tpot_s=Distribution.of(self.tpot_s),
            queueing_s=Distribution.of(self.queueing_s),
            batch=Distribution.of_counts(self.batches),
            step_rows=Distribution.of_counts(self.rows),
            peak_running=self.peak_running,
            peak_waiting=self.peak_waiting,
            blocks=blocks,
            peak_blocks=self.peak_blocks,
            mean_blocks=self.block_seconds / seconds if seconds else 0.0,
            compute_busy=compute_busy,
            attention_busy=attention_busy,
        )
