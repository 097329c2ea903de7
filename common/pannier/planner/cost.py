"""What one step costs: seconds of compute, attention and transfer from a few numbers, and what lanes make of them.

Every formula is a roofline: the slower of moving the bytes and doing the arithmetic.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from pannier.scheduler import Step
from pannier.wire.messages import SegmentKind


@dataclass(slots=True)
class Work:
    """What one step asks of the devices; a mean of many need not be whole."""

    rows: float = 0
    """Query tokens: each is multiplied with every weight."""
    chunk_pairs: float = 0
    """(query, key) pairs inside the chunks, which are the compute device's."""
    answered_rows: float = 0
    """Rows whose q goes out and whose output comes back."""
    one_way_rows: float = 0
    """Rows of fresh prompts: only their K and V go out."""
    tokens_read: dict[int, float] = field(default_factory=dict)
    """Group -> stored tokens whose K and V it reads: once for all the rows of a chunk."""
    pairs: dict[int, float] = field(default_factory=dict)
    """Group -> (query, stored token) pairs."""


class StepTime(NamedTuple):
    """Seconds of one step when nothing else runs."""

    compute_s: float
    """T_m of DESIGN 6."""
    attention_s: Mapping[int, float]
    """Group -> T_a; the groups work at the same time."""
    transfer_s: float
    """T_c: what the lane waits for the link."""


class Clock(Protocol):
    """Says how long a step takes."""

    def step_time(self, work: Work) -> StepTime:
        """Seconds of compute, attention and transfer."""


@dataclass(frozen=True, kw_only=True)
class ModelCost:
    """The numbers of a model that its speed depends on. N parameters, L calls, width d, G queries a KV head, e bytes.

    Notation and the counts of bytes and FLOPs are those of the Lamina paper (arXiv 2405.01814v2, table 2 and its text).
    """

    weights_bytes: float
    """e N: read once in every step."""
    flops_per_row: float
    """2 N: a multiplication and an addition with every weight."""
    flops_per_pair: float
    """4 d L: q k and p v, each a multiplication and an addition, for one query and one stored token."""
    kv_bytes: float
    """2 e d L / G: K and V of one token."""
    answered_bytes: float
    """(2 + 2/G) e d L: q, K, V and the output of one row."""
    calls: int
    """L: round trips of a step."""

    @classmethod
    def dense(cls, *, weights_bytes: float, layers: int, width: int, queries_per_kv: int, itemsize: int) -> "ModelCost":
        """A model whose layers are all alike, all of whose weights work on every token; one dtype throughout."""
        layer_bytes = itemsize * width * layers
        return cls(
            weights_bytes=weights_bytes,
            flops_per_row=2 * weights_bytes / itemsize,
            flops_per_pair=4 * width * layers,
            kv_bytes=2 * layer_bytes / queries_per_kv,
            answered_bytes=(2 + 2 / queries_per_kv) * layer_bytes,
            calls=layers,
        )


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What devices and links do in a second, as achieved rather than as advertised."""

    compute_flops: float
    """FLOP/s of one compute replica."""
    compute_bandwidth: float
    """Bytes/s from the memory of one compute replica."""
    attention_flops: float
    """FLOP/s of one group, all its workers together."""
    attention_bandwidth: float
    """Bytes/s from the memory of one group, all its workers together."""
    link_bandwidth: float
    """Bytes/s between one replica and its groups."""
    round_trip_s: float
    """Seconds from the first byte of a request to the last of an empty answer."""


@dataclass(frozen=True)
class Roofline:
    """The clock of a model on devices.

    =========  ======================================================================================================
    compute    max(weights / bandwidth, (rows 2 N + chunk pairs 4 d L) / FLOP rate)
    attention  max(tokens read x KV bytes / bandwidth, pairs 4 d L / FLOP rate); the second term is that of chunks over
               a long past
    transfer   answered rows (2 + 2/G) e d L / link + L round trips; and what the K and V of fresh prompts need of the
               link beyond the compute that they hide behind (DESIGN 4)
    =========  ======================================================================================================

    The first two are what the paper calls MTIME(B) and ATIME(B, l) and measures; as rooflines they are derived from its
    counts. The payload of the third is the paper's.
    """

    model: ModelCost
    rates: Rates

    def step_time(self, work: Work) -> StepTime:
        """Seconds of compute, attention and transfer."""
        model, rates = self.model, self.rates
        flops = work.rows * model.flops_per_row + work.chunk_pairs * model.flops_per_pair
        compute_s = max(model.weights_bytes / rates.compute_bandwidth, flops / rates.compute_flops)
        read_s, pair_s = model.kv_bytes / rates.attention_bandwidth, model.flops_per_pair / rates.attention_flops
        attention_s = {
            group: max(tokens * read_s, work.pairs[group] * pair_s) for group, tokens in work.tokens_read.items()
        }
        transfer_s = max(0.0, work.one_way_rows * model.kv_bytes / rates.link_bandwidth - compute_s)
        if work.answered_rows:
            answered_s = work.answered_rows * model.answered_bytes / rates.link_bandwidth
            transfer_s += answered_s + model.calls * rates.round_trip_s
        return StepTime(compute_s, attention_s, transfer_s)


def work_of(step: Step) -> Work:
    """What a planned step asks of the devices."""
    work = Work(rows=len(step.token_ids))
    tokens_read, pairs = work.tokens_read, work.pairs
    decode, chunk = SegmentKind.DECODE, SegmentKind.CHUNK
    for segment in step.segments:
        rows, stored, group = segment.num_queries, segment.num_stored, segment.group
        if segment.kind is decode:
            stored += 1  # the row itself
        elif segment.kind is chunk:
            work.chunk_pairs += rows * (rows + 1) // 2
        if stored:
            work.answered_rows += rows
            tokens_read[group] = tokens_read.get(group, 0) + stored
            pairs[group] = pairs.get(group, 0) + rows * stored
        else:
            work.one_way_rows += rows
    return work


def lane_bound(compute_s: float, attention_s: float, transfer_s: float, lanes: int) -> float:
    """Least mean seconds for a step of one of a replica's equal lanes, all devices being its own (DESIGN 6)."""
    return max(compute_s, attention_s, (compute_s + attention_s + transfer_s) / lanes)
