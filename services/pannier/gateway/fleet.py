"""The workers a gateway knows: what each brought, where it stands, and what it is to be told. No I/O."""

from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count

from pannier.runtime.errors import ConfigError, NotAccepted
from pannier.scheduler import AttentionOffer, PlacementError, form_groups
from pannier.wire import Dtype
from pannier.wire import messages as m

MAX_LANES = 64


class Standing(StrEnum):
    """Where a worker stands with its gateway."""

    REGISTERED = "registered"
    """Said hello; its data thread has not joined."""
    JOINED = "joined"
    """Can be given something to do."""
    STARTING = "starting"
    """Was told what to do, and is not ready."""
    READY = "ready"
    FENCING = "fencing"
    """Its session ends: attention workers have yet to say that nothing of it can be written."""
    LOST = "lost"
    """Silent; it may come back, into a new session."""


@dataclass
class AttentionEntry:
    """One attention worker."""

    hello: m.Hello
    facts: m.AttentionFacts
    missed: int = 0
    """Heartbeats that were due since the last one came."""
    standing: Standing = Standing.REGISTERED
    assign: m.AttentionAssign | None = None
    counters: dict[str, float] = field(default_factory=dict)


@dataclass
class ComputeEntry:
    """One compute worker. Its lanes have numbers of their own among all lanes."""

    hello: m.Hello
    facts: m.ComputeFacts
    first_lane: int
    missed: int = 0
    """Heartbeats that were due since the last one came."""
    standing: Standing = Standing.REGISTERED
    session: int = 0
    leaves: bool = False
    """Once fenced it is forgotten (its process has ended), not restarted."""
    alive: bool = True
    """False while nothing is heard of it."""
    detail: str = ""
    fences: set[str] = field(default_factory=set)
    """Attention workers that have yet to acknowledge the end of the session."""
    failed: m.StepFailed | None = None
    """The step for which the session ends."""
    counters: dict[str, float] = field(default_factory=dict)

    @property
    def lanes(self) -> range:
        """Numbers of its lanes in the scheduler."""
        return range(self.first_lane, self.first_lane + self.facts.lanes)


@dataclass(frozen=True)
class FleetConfig:
    """What the gateway expects of its workers."""

    life: int
    model: str
    digest: str
    compute_workers: int
    attention_workers: int
    block_size: int
    kv_dtype: Dtype | None
    """None: the wire dtype of the compute workers."""
    heads_split: tuple[int, ...] | None
    max_batch_tokens: int

    def kv_dtype_for(self, facts: m.ComputeFacts) -> Dtype:
        """What K and V of this model are stored in."""
        return self.kv_dtype or facts.wire_dtype

    def token_bytes(self, facts: m.ComputeFacts) -> int:
        """Bytes of one token's K and V over all calls and heads."""
        elements = sum(call.kv_heads * (call.k_size + call.v_size) for call in facts.calls)
        return elements * self.kv_dtype_for(facts).itemsize


class Fleet:
    """All workers, and the groups that attention workers form."""

    def __init__(self, config: FleetConfig) -> None:
        self.config = config
        self.compute: dict[str, ComputeEntry] = {}
        self.attention: dict[str, AttentionEntry] = {}
        self._next_lane = count()
        self.num_groups = 0
        """Groups formed so far; a number is never used again."""

    def accept(self, hello: m.Hello) -> None:
        """Take a worker in, or take it back after a restart. Raises `NotAccepted` with the reason."""
        if hello.protocol != m.PROTOCOL:
            raise NotAccepted(f"{hello.name} speaks protocol {hello.protocol}; this gateway speaks {m.PROTOCOL}")
        if hello.compute is not None:
            _check_limits(hello.name, hello.compute)
            self._check_model(hello.name, hello.compute)
        self._check_alone(hello)
        self._check_encryption(hello)
        if hello.compute is not None:
            lanes = [next(self._next_lane) for _ in range(hello.compute.lanes)]
            self.compute[hello.name] = ComputeEntry(hello, hello.compute, lanes[0])
        if hello.attention is not None:
            self.attention[hello.name] = AttentionEntry(hello, hello.attention)

    def _check_alone(self, hello: m.Hello) -> None:
        """A monolithic worker's blocks can't be reached from other processes, nor does it need theirs."""
        known = [entry.hello for entry in self.compute.values()] + [entry.hello for entry in self.attention.values()]
        others = [each for each in known if each.name != hello.name]
        if others and any(each.compute and each.attention for each in (hello, *others)):
            raise NotAccepted(
                f"{hello.name} and {others[0].name} can't share a gateway: one of them is monolithic, and runs alone"
            )

    def _check_encryption(self, hello: m.Hello) -> None:
        """Links have two ends; a compute worker of one mind and an attention worker of another would never meet."""
        known = [entry.hello for entry in self.compute.values()] + [entry.hello for entry in self.attention.values()]
        other = next((each for each in known if each.encrypts_links != hello.encrypts_links), None)
        if other is not None:
            does, does_not = (hello, other) if hello.encrypts_links else (other, hello)
            raise NotAccepted(
                f"{does.name} encrypts its links and {does_not.name} does not: give both the same keys and encrypt"
            )

    def _check_model(self, name: str, facts: m.ComputeFacts) -> None:
        if facts.digest != self.config.digest:
            raise NotAccepted(
                f"{name} serves {facts.model} ({facts.digest[:12]}), but this gateway serves "
                f"{self.config.model} ({self.config.digest[:12]}): give both the same model"
            )
        others = [entry.facts for other, entry in self.compute.items() if other != name]
        if any((other.calls, other.wire_dtype) != (facts.calls, facts.wire_dtype) for other in others):
            raise NotAccepted(f"{name} runs {facts.dtype}, and the other compute workers do not: choose one dtype")

    def knows(self, name: str) -> bool:
        """Whether a worker of that name is registered."""
        return name in self.compute or name in self.attention

    def knows_process(self, hello: m.Hello) -> bool:
        """Whether the very process that says hello is registered."""
        entry = self.compute.get(hello.name) or self.attention.get(hello.name)
        return entry is not None and entry.hello.start == hello.start

    def computes_lane(self, lane: int) -> ComputeEntry:
        """The compute worker that a lane belongs to."""
        return next(entry for entry in self.compute.values() if lane in entry.lanes)

    def open_lanes(self) -> list[int]:
        """Lanes whose compute worker can take a step now."""
        return [lane for e in self.compute.values() if e.standing is Standing.READY for lane in e.lanes]

    def is_complete(self) -> bool:
        """Whether as many compute workers as are expected can take steps."""
        num_ready = sum(entry.standing is Standing.READY for entry in self.compute.values())
        return num_ready >= self.config.compute_workers

    def group_members(self, group: int) -> list[AttentionEntry]:
        """The attention workers of a group."""
        return [e for e in self.attention.values() if e.assign is not None and e.assign.group == group]

    def seen(self, name: str, counters: dict[str, float]) -> None:
        """Note a sign of life."""
        for entry in (self.compute.get(name), self.attention.get(name)):
            if entry is not None:
                entry.missed, entry.counters = 0, counters

    def silent(self, limit: int) -> list[str]:
        """A heartbeat is due of every worker: who has missed more than `limit`, those excepted of which it is known.

        Counted, not timed: a gateway that was stopped for a while must not take its own silence for theirs.
        """
        workers = [(name, e) for name, e in self.compute.items() if e.alive] + list(self.attention.items())
        for _, entry in workers:
            entry.missed += 1
        return sorted({name for name, entry in workers if entry.missed > limit})

    def joined(self, name: str) -> None:
        """A worker's data thread can be reached from now on; again is no news."""
        for entry in (self.compute.get(name), self.attention.get(name)):
            if entry is not None and entry.standing is Standing.REGISTERED:
                entry.standing = Standing.JOINED

    def new_groups(self) -> list[tuple[str, m.AttentionAssign]]:
        """What attention workers that belong to no group are told, once there are enough of them.

        At first as many as were configured; later as many as the groups that are left lack to that number, so that
        the successor of a lost worker and what is left of its group form another. Raises `ConfigError` if they can't
        hold the model's cache.
        """
        facts = next((e.facts for e in self.compute.values() if e.standing is not Standing.REGISTERED), None)
        free = self._free_attention()
        in_groups = sum(entry.assign is not None for entry in self.attention.values())
        if facts is None or not free or len(free) < self.config.attention_workers - in_groups:
            return []
        kv_dtype = self.config.kv_dtype_for(facts)
        offers = [AttentionOffer(name, e.facts.memory_bytes, e.facts.bandwidth) for name, e in free]
        split = self.config.heads_split
        try:
            plans = form_groups(
                offers,
                facts.calls,
                block_size=self.config.block_size,
                itemsize=kv_dtype.itemsize,
                split=",".join(map(str, split)) if split else None,
            )
        except PlacementError as error:
            raise ConfigError(str(error)) from error
        assigns = []
        for plan in plans:
            group, self.num_groups = self.num_groups, self.num_groups + 1
            for number, shard in enumerate(plan.shards):
                assign = m.AttentionAssign(
                    life=self.config.life,
                    group=group,
                    shard=number,
                    calls=facts.calls,
                    heads=shard.heads,
                    num_blocks=plan.num_blocks,
                    block_size=self.config.block_size,
                    kv_dtype=kv_dtype,
                    wire_dtype=facts.wire_dtype,
                )
                entry = self.attention[shard.worker]
                entry.assign, entry.standing = assign, Standing.STARTING
                assigns.append((shard.worker, assign))
        return assigns

    def _free_attention(self) -> list[tuple[str, AttentionEntry]]:
        """Those that can be given a shard; behind the first groups, as many as a given split of heads divides."""
        free = sorted((name, e) for name, e in self.attention.items() if e.standing is Standing.JOINED)
        split, is_first = self.config.heads_split, self.num_groups == 0
        return free if is_first or not split else free[: len(free) - len(free) % len(split)]

    def ready_groups(self) -> dict[int, int]:
        """Groups all of whose shards are ready, and their blocks."""
        shards = [(e.assign, e.standing) for e in self.attention.values() if e.assign is not None]
        waiting = {assign.group for assign, standing in shards if standing is not Standing.READY}
        return {assign.group: assign.num_blocks for assign, _ in shards if assign.group not in waiting}

    def compute_assign(self, name: str) -> m.ComputeAssign:
        """What a compute worker is told as its present session begins: every group that is ready."""
        return m.ComputeAssign(
            life=self.config.life,
            session=self.compute[name].session,
            groups=tuple(self._address(group) for group in sorted(self.ready_groups())),
            max_batch_tokens=self.config.max_batch_tokens,
            block_size=self.config.block_size,
        )

    def _address(self, group: int) -> m.GroupAddress:
        members = [(e.assign, e) for e in self.group_members(group) if e.assign is not None]
        members.sort(key=lambda member: member[0].shard)
        return m.GroupAddress(
            group,
            tuple(
                m.ShardAddress(e.hello.name, e.facts.endpoint, a.heads, e.facts.door, e.facts.tcp) for a, e in members
            ),
        )


def _check_limits(name: str, facts: m.ComputeFacts) -> None:
    if not 1 <= facts.lanes <= MAX_LANES:
        raise NotAccepted(f"{name} has {facts.lanes} lanes; 1 to {MAX_LANES} are possible")
    if facts.max_model_len < 2:
        raise NotAccepted(f"the model of {name} has a window of {facts.max_model_len}; a prompt and an answer need 2")
