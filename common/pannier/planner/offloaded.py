"""Attention offloading on two pools: what a lane-step takes, and how many sequences there is room for.

=========  ============================================================================================================
compute    T_m = max(weights / bandwidth, (rows 2 N + chunk pairs 4 d L) / FLOP rate): MTIME(B) of the Lamina paper
attention  T_a = rows x K and V of a context / bandwidth: ATIME(B, l), of the group and the shard that take longest
transfer   T_c = what is sent / rate + what comes back / rate + L round trips; payload (2 + 2/G) e d B L both ways
a step     max(T_m / stages, replicas T_a, link, (T_m + T_a + T_c) / lanes): `pannier.planner.overlap`
=========  ============================================================================================================

The paper (arXiv 2405.01814v2) measures MTIME and ATIME; as rooflines they are derived from its counts.
"""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import inf

from pannier.planner.devices import Device, Kind
from pannier.planner.figures import NO_GOAL, NO_PROMPTS, Figures, Goal, Prompts, Step, most_sequences
from pannier.planner.mix import Mix
from pannier.planner.overlap import Parts, lane_step_bound
from pannier.planner.sizes import ModelSizes
from pannier.scheduler.placement import AttentionOffer, GroupPlan, form_groups
from pannier.wire import Dtype
from pannier.wire.messages import CallGeometry, HeadRange

NO_LIMIT = 1e18
"""Bytes per second that no link has."""


@dataclass(frozen=True, kw_only=True)
class Wire:
    """What lies between the pools; bytes per second each way."""

    round_trip_s: float = 200e-6
    """Of an empty exchange."""
    flow: float = inf
    """Of one connection."""
    flows: int = 1
    """Connections of each link."""
    limit: float | None = None
    """In place of what the instances' network gives to each device: another cable, or PCIe in one host."""

    def of(self, device: Device) -> float:
        """What one device can send, and receive."""
        return device.network if self.limit is None else self.limit

    @property
    def pair(self) -> float:
        """What one compute and one attention device can exchange."""
        return self.flow * self.flows


NETWORK = Wire()
"""The instances' own, without a limit on single connections."""


@dataclass(frozen=True, kw_only=True)
class Placed:
    """One group's part, and that of its slowest shard. Rates a second, over the whole group."""

    share: float
    """Of all sequences: by its blocks."""
    bandwidth: float
    flops: float
    busiest: float
    """Largest part of a call's heads that one device of it has."""


@dataclass(frozen=True, kw_only=True)
class Offloaded:
    """A compute pool in replicas of some stages, and an attention pool in groups, which all replicas share."""

    model: ModelSizes
    mix: Mix
    compute: Kind
    attention: Kind
    compute_devices: int
    attention_devices: int
    stages: int = 1
    """Devices that share a replica's weights."""
    lanes_per_stage: int = 2
    is_tensor_parallel: bool = False
    """The devices of a replica share each slice, at no cost, as the paper has it; ours take turns."""
    wire: Wire = NETWORK
    has_prefill: bool = True
    chunk: int = 2048
    block_size: int = 64

    @property
    def replicas(self) -> int:
        """Compute devices, divided by stages."""
        return self.compute_devices // self.stages

    @property
    def lanes(self) -> int:
        """Of each replica: two for each of its stages."""
        return self.lanes_per_stage * (1 if self.is_tensor_parallel else self.stages)

    @property
    def usd_per_hour(self) -> float:
        """Of both pools."""
        return (
            self.compute_devices * self.compute.device.usd_per_hour
            + self.attention_devices * self.attention.device.usd_per_hour
        )

    @property
    def has_room_for_weights(self) -> bool:
        """Whether each stage's part of them fits; all parts are taken to be equal."""
        return self.model.weight_bytes / self.stages <= self.compute.device.memory_bytes

    @cached_property
    def groups(self) -> tuple[GroupPlan, ...]:
        """As the engine would form them. Raises `PlacementError` for what it would refuse."""
        device = self.attention.device
        offer = AttentionOffer("", int(device.memory_bytes), device.kv_bandwidth)
        return _groups(offer, self.attention_devices, self.model.geometry, self.block_size, self.model.itemsize)

    @cached_property
    def placed(self) -> tuple[Placed, ...]:
        """What the groups bring."""
        blocks = sum(group.num_blocks for group in self.groups)
        return tuple(self._placed(group, group.num_blocks / blocks) for group in self.groups)

    @cached_property
    def room(self) -> int:
        """Sequences of the mean context, and half a block each, that the groups hold together."""
        per_group = (group.num_blocks * self.block_size for group in self.groups)
        return sum(int(tokens / (self.mix.context + self.block_size / 2)) for tokens in per_group)

    def step(self, sequences: float) -> Step:
        """A lane-step when so many sequences are spread over all lanes."""
        lanes = min(self.lanes, max(1.0, sequences / self.replicas))  # with fewer sequences some stay empty
        rows = max(1.0, sequences / (self.replicas * lanes))
        prompts = self._prompts(rows)
        compute_s, held_by = self._compute(rows, prompts, prompts.rows)
        attention_s = self._attention(rows, prompts)
        answered = rows + prompts.past_rows
        one_way = (prompts.rows - prompts.past_rows) * self.model.kv_bytes
        sent, returned = answered * self.model.sent_bytes, answered * self.model.returned_bytes
        transfer_s = self._wire_s(sent) + self._wire_s(returned) + len(self.model.calls) * self.wire.round_trip_s
        parts = Parts(compute_s, attention_s, transfer_s)
        link_s = max(self._link_s(sent + one_way), self._link_s(returned))
        in_turn = self.stages // self._at_once
        bound = lane_step_bound(parts, lanes, self.replicas, in_turn, link_s)
        busy = max(compute_s / in_turn, self.replicas * attention_s)
        period_s = lanes * bound.seconds
        return Step(
            rows=rows,
            parts=parts,
            bound=bound,
            exposed_s=bound.seconds - busy,
            period_s=period_s,
            ttft_s=self._ttft(rows, prompts, period_s) if self.has_prefill else None,
            compute_held_by=held_by,
            sent_bytes=sent + one_way,
            returned_bytes=returned,
        )

    def figures(self, goal: Goal = NO_GOAL) -> Figures | None:
        """With as many sequences as memory and goal allow; None if that is none, or the weights don't fit."""
        if not self.has_room_for_weights or self.compute_devices % self.stages:
            return None
        sequences, held_by = most_sequences(self.room, goal, self.step)
        if not sequences:
            return None
        step = self.step(sequences)
        return Figures(
            engine="offloaded",
            sequences=sequences,
            sequences_held_by=held_by,
            step=step,
            tokens_per_s=sequences / step.period_s,
            usd_per_hour=self.usd_per_hour,
            devices=self.compute_devices + self.attention_devices,
        )

    def _placed(self, group: GroupPlan, share: float) -> Placed:
        device = self.attention.device
        bytes_of = [sum(self._part_bytes(call, heads) for call, heads in enumerate(s.heads)) for s in group.shards]
        largest = max(bytes_of) / sum(bytes_of)
        flops = inf if device.flops is None else device.flops / largest
        return Placed(share=share, bandwidth=device.kv_bandwidth / largest, flops=flops, busiest=largest)

    def _part_bytes(self, call: int, heads: HeadRange) -> float:
        size = self.model.calls[call]
        return (heads.stop - heads.start) * (size.k_size + size.v_size)

    def _prompts(self, rows: float) -> Prompts:
        return Prompts.of(self.mix, rows, self.chunk) if self.has_prefill else NO_PROMPTS

    def _compute(self, rows: float, prompts: Prompts, prompt_rows: float) -> tuple[float, str]:
        """Of a whole lane-step; a replica's devices take it in turns, or share it if they are tensor-parallel."""
        model, device = self.model, self.compute.device
        flops = (rows + prompt_rows) * model.flops_per_row + prompts.pairs * model.flops_per_pair
        weights_s = model.read_bytes(rows + prompt_rows) / device.weight_bandwidth
        flops_s = flops / device.flops if device.flops else 0.0
        return max((weights_s / self._at_once, "weights"), (flops_s / self._at_once, "arithmetic"))

    def _attention(self, rows: float, prompts: Prompts) -> float:
        model, context = self.model, self.mix.context
        read = rows * model.kv_read_bytes(context) + prompts.past_tokens * model.kv_bytes
        flops = (rows * context + prompts.past_pairs) * model.flops_per_pair
        return max(each.share * max(read / each.bandwidth, flops / each.flops) for each in self.placed)

    def _wire_s(self, num_bytes: float) -> float:
        """How long a lane-step waits for what goes one way: for its own device, or for the busiest attention device."""
        out = num_bytes / self._at_once / self.wire.of(self.compute.device)
        slowest = min(self.wire.of(self.attention.device), self._at_once * self.wire.pair)
        return max(out, num_bytes * self._busiest / slowest)

    def _link_s(self, num_bytes: float) -> float:
        """How long one lane-step of each replica occupies what it goes over in one direction, at the busiest place."""
        at_compute = num_bytes / self.stages / self.wire.of(self.compute.device)
        at_attention = self.replicas * num_bytes * self._busiest / self.wire.of(self.attention.device)
        between = num_bytes / self.stages * self._busiest / self.wire.pair
        return max(at_compute, at_attention, between)

    @property
    def _at_once(self) -> int:
        """Devices of a replica that work on the same slice."""
        return self.stages if self.is_tensor_parallel else 1

    @cached_property
    def _busiest(self) -> float:
        """Largest part of a lane-step's tensors that one attention device gets."""
        return max(each.share * each.busiest for each in self.placed)

    def _ttft(self, rows: float, prompts: Prompts, period_s: float) -> float:
        """Of the chunks of a mean prompt, each in a lane-step that is longer for it."""
        chunks = max(1.0, self.mix.prompt / self.chunk)
        full, _ = self._compute(rows, prompts, min(self.mix.prompt, self.chunk))
        usual, _ = self._compute(rows, prompts, prompts.rows)
        return chunks * (period_s + max(0.0, full - usual))


@lru_cache(maxsize=1024)  # most of the time of a search otherwise
def _groups(
    offer: AttentionOffer, count: int, calls: tuple[CallGeometry, ...], block_size: int, itemsize: int
) -> tuple[GroupPlan, ...]:
    offers = [replace(offer, name=str(number)) for number in range(count)]
    kv_dtype = {2: Dtype.BFLOAT16, 4: Dtype.FLOAT32}[itemsize]  # a plan has one dtype throughout
    return form_groups(offers, calls, block_size=block_size, kv_dtype=kv_dtype)
