"""The workers a gateway knows: what each brought, where it stands, and what it is to be told. No I/O."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from pannier.gateway.dtypes import Dtypes, choose_dtypes, lacking
from pannier.gateway.entries import AttentionEntry, ComputeEntry, Session, Standing
from pannier.runtime.errors import ConfigError, NotAccepted
from pannier.scheduler import AttentionOffer, PlacementError, form_groups
from pannier.wire import Dtype
from pannier.wire import messages as m

MAX_LANES = 64


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
    """None: chosen from what the workers compute."""
    heads_split: tuple[int, ...] | None
    max_batch_tokens: int

    def token_bytes(self, facts: m.ComputeFacts) -> int:
        """Bytes of one token's K and V over all calls and heads, as far as is known before attention workers are."""
        dtype = self.kv_dtype or facts.wire_dtype
        return sum(
            call.kv_heads * (dtype.stored_bytes(call.k_size) + dtype.stored_bytes(call.v_size)) for call in facts.calls
        )


class Fleet:
    """All workers, and the groups that attention workers form."""

    def __init__(self, config: FleetConfig) -> None:
        self.config = config
        self.compute: dict[str, ComputeEntry] = {}
        self.attention: dict[str, AttentionEntry] = {}
        self._next_lane = count()
        self.dtypes: Dtypes | None = None
        """Of all groups, from the first one on."""
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
        if hello.attention is not None:
            self._check_dtypes(hello.name, hello.attention)
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

    def _check_dtypes(self, name: str, facts: m.AttentionFacts) -> None:
        wanted = self.config.kv_dtype
        needed = [] if wanted is None else [wanted]
        if self.dtypes is not None:
            needed = [choice.dtype for choice in self.dtypes]
        if (reason := lacking(name, facts, needed)) is not None:
            raise NotAccepted(reason)

    def _check_model(self, name: str, facts: m.ComputeFacts) -> None:
        if facts.digest != self.config.digest:
            raise NotAccepted(
                f"{name} serves {facts.model} ({facts.digest[:12]}), but this gateway serves "
                f"{self.config.model} ({self.config.digest[:12]}): give both the same model"
            )
        others = [entry.facts for other, entry in self.compute.items() if other != name]
        _check_stages(name, facts, others)
        if any((other.calls, other.wire_dtype) != (facts.calls, facts.wire_dtype) for other in others):
            raise NotAccepted(f"{name} runs {facts.dtype}, and the other compute workers do not: choose one dtype")

    def knows(self, name: str) -> bool:
        """Whether a worker of that name is registered."""
        return name in self.compute or name in self.attention

    def knows_process(self, hello: m.Hello) -> bool:
        """Whether the very process that says hello is registered."""
        entry = self.compute.get(hello.name) or self.attention.get(hello.name)
        return entry is not None and entry.hello.start == hello.start

    def sessions(self) -> list[Session]:
        """Those there are now, each once."""
        return [e.session for e in self.compute.values() if e.session is not None and e.session.workers[0] is e]

    def session_of(self, lane: int) -> Session:
        """The session that a lane belongs to."""
        return next(session for session in self.sessions() if lane in session.lanes)

    def open_lanes(self) -> list[int]:
        """Lanes that can take a step now."""
        return [lane for session in self.sessions() if session.standing is Standing.READY for lane in session.lanes]

    def takes_requests(self) -> bool:
        """Whether a lane is open or soon will be: a session starts, or another is to follow the one that is fenced."""
        workers = [session.workers for session in self.sessions()]
        return bool(self.ready_groups()) and any(all(e.alive and not e.leaves for e in each) for each in workers)

    def is_complete(self) -> bool:
        """Whether as many compute workers as are expected can take steps."""
        num_ready = sum(entry.standing is Standing.READY for entry in self.compute.values())
        return num_ready >= self.config.compute_workers

    def next_replica(self) -> tuple[ComputeEntry, ...]:
        """Compute workers in no session that together run the whole model, in the order of stages; or none.

        Of several that run the same stage, who came first goes first.
        """
        free = [entry for entry in self.compute.values() if entry.standing is Standing.JOINED]
        for count_ in sorted({entry.stage[1] for entry in free}):
            by_stage = {entry.stage: entry for entry in reversed(free)}
            replica = [by_stage.get((number, count_)) for number in range(count_)]
            if None not in replica:
                return tuple(entry for entry in replica if entry is not None)
        return ()

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
        compute, attention = self.compute.get(name), self.attention.get(name)
        if compute is not None:
            compute.joined = True
        if attention is not None and attention.standing is Standing.REGISTERED:
            attention.standing = Standing.JOINED

    def new_groups(self) -> list[tuple[str, m.AttentionAssign]]:
        """What attention workers that belong to no group are told, once there are enough of them.

        At first as many as were configured; later as many as the groups that are left lack to that number, so that
        the successor of a lost worker and what is left of its group form another. Raises `ConfigError` if they can't
        hold the model's cache.
        """
        facts = next((e.facts for e in self.compute.values() if e.joined), None)
        free = self._free_attention()
        in_groups = sum(entry.assign is not None for entry in self.attention.values())
        if facts is None or not free or len(free) < self.config.attention_workers - in_groups:
            return []
        if self.dtypes is None:
            native = set.intersection(*(set(entry.facts.dtypes) for entry in self.attention.values()))
            self.dtypes = choose_dtypes(facts.wire_dtype, self.config.kv_dtype, native)
        offers = [AttentionOffer(name, e.facts.memory_bytes, e.facts.bandwidth) for name, e in free]
        split = self.config.heads_split
        try:
            plans = form_groups(
                offers,
                facts.calls,
                block_size=self.config.block_size,
                kv_dtype=self.dtypes.kv.dtype,
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
                    kv_dtype=self.dtypes.kv.dtype,
                    wire_dtype=self.dtypes.wire.dtype,
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

    def compute_assign(self, session: Session, worker: ComputeEntry) -> m.ComputeAssign:
        """What a compute worker is told as a session begins: every group that is ready, and the stage behind it."""
        return m.ComputeAssign(
            life=self.config.life,
            session=session.number,
            groups=tuple(self._address(group) for group in sorted(self.ready_groups())),
            max_batch_tokens=self.config.max_batch_tokens,
            block_size=self.config.block_size,
            next_stage=_next_stage(session, worker),
            wire_dtype=None if self.dtypes is None else self.dtypes.wire.dtype,
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


def _next_stage(session: Session, worker: ComputeEntry) -> m.StageAddress | None:
    following = session.workers[(worker.stage[0] + 1) % len(session.workers)]
    stage = following.facts.stage
    return None if stage is None else m.StageAddress(following.hello.name, stage.endpoint)


def _check_limits(name: str, facts: m.ComputeFacts) -> None:
    if not 1 <= facts.lanes <= MAX_LANES:
        raise NotAccepted(f"{name} has {facts.lanes} lanes; 1 to {MAX_LANES} are possible")
    if facts.max_model_len < 2:
        raise NotAccepted(f"the model of {name} has a window of {facts.max_model_len}; a prompt and an answer need 2")


def _check_stages(name: str, facts: m.ComputeFacts, others: Sequence[m.ComputeFacts]) -> None:
    """Stages of as many may have to compute together, lane by lane."""
    if facts.stage is None:
        return
    number, count_ = facts.stage.number, facts.stage.count
    if number >= count_:
        raise NotAccepted(f"{name} runs stage {number} of {count_}; they are counted from 0")
    lanes = {other.lanes for other in others if other.stage is not None and other.stage.count == count_}
    if lanes - {facts.lanes}:
        raise NotAccepted(f"{name} has {facts.lanes} lanes, and other stages have {max(lanes)}: give all the same")
