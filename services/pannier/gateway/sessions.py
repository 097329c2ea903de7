"""Sessions of compute workers: when they start, how they are fenced, what a lost worker means. No I/O.

A session ends with a fence: every attention worker says that nothing of it can be written any more. Only then are its
steps dropped, so that blocks are never given to others while a late write may be under way. The next session starts
with the groups there are then. The same serves a step that failed and a group that came or went: rare events, so one
way through all of them, with a step or two repeated, is worth more than a shorter one for each.
"""

from collections.abc import Callable
from itertools import count

import structlog

from pannier.gateway.fleet import AttentionEntry, ComputeEntry, Fleet, Standing
from pannier.runtime.errors import ConfigError
from pannier.scheduler import Output, Scheduler
from pannier.wire import GatewayToWorkerData
from pannier.wire import messages as m

Tell = Callable[[str, GatewayToWorkerData], None]
log = structlog.get_logger()


class Sessions:
    """Moves every worker from one standing to the next; `tell` sends, `deliver` takes what losses do to requests."""

    def __init__(
        self, fleet: Fleet, scheduler: Callable[[], Scheduler], tell: Tell, deliver: Callable[[list[Output]], None]
    ) -> None:
        self._fleet = fleet
        self._scheduler = scheduler
        self._tell = tell
        self._deliver = deliver
        self._next_session = count(1)

    def joined(self, name: str) -> None:
        """A worker's data thread has joined: give it something to do, if all that it needs is there.

        Raises `ConfigError` when the first attention workers can't hold the model's cache. Of later ones it is only
        said: what is served goes on without them.
        """
        self._fleet.joined(name)
        try:
            assigns = self._fleet.new_groups()
        except ConfigError as error:
            if not self._fleet.num_groups:
                raise
            log.error("no group", worker=name, reason=str(error))
            assigns = []
        for worker, assign in assigns:
            self._tell(worker, assign)
        if name in self._fleet.compute:
            self._start(self._fleet.compute[name])

    def ready(self, name: str, ready: m.Ready) -> None:
        """A worker has in place what it was assigned: a shard, or a session."""
        if ready.group is not None:
            self._shard_ready(name, ready.group)
        elif name in self._fleet.compute:
            self._session_ready(self._fleet.compute[name], ready)

    def _shard_ready(self, name: str, group: int) -> None:
        attention = self._fleet.attention.get(name)
        if attention is None or attention.standing is not Standing.STARTING or attention.assign is None:
            return
        if attention.assign.group == group:  # and not one that was lost before it was complete
            attention.standing = Standing.READY
            self._open_group(attention)

    def _session_ready(self, compute: ComputeEntry, ready: m.Ready) -> None:
        if (compute.standing, compute.session) != (Standing.STARTING, ready.session):
            return
        compute.standing, compute.detail = Standing.READY, ready.detail
        for lane in compute.lanes:
            self._scheduler().add_lane(lane)
        log.info("session started", worker=compute.hello.name, session=ready.session, links=ready.detail)

    def fence(self, compute: ComputeEntry) -> None:
        """End a compute worker's session; the next one starts when every attention worker has acknowledged."""
        if compute.standing not in (Standing.STARTING, Standing.READY):
            return
        name = compute.hello.name
        compute.standing = Standing.FENCING
        # Also those that hold nothing now: what is left of a lost group knows the session.
        compute.fences = {other for other, e in self._fleet.attention.items() if e.standing is not Standing.REGISTERED}
        log.warning("session fenced", worker=name, session=compute.session)
        for attention in sorted(compute.fences):
            self._tell(attention, m.Fence(self._fleet.config.life, name, compute.session))
        self._end_if_fenced(compute)

    def failed(self, compute: ComputeEntry, failed: m.StepFailed) -> None:
        """A step can't be done: its requests end with an error, once nothing of it can be written any more."""
        compute.failed = failed
        self.fence(compute)

    def fenced(self, name: str, fenced: m.Fenced) -> None:
        """An attention worker has acknowledged a fence."""
        compute = self._fleet.compute.get(fenced.compute)
        if compute is not None and compute.session == fenced.session:
            compute.fences.discard(name)
            self._end_if_fenced(compute)

    def lost(self, name: str, reason: str, *, leaves: bool) -> None:
        """Nothing more is to be expected of a worker: for now, or (it `leaves`) for good."""
        log.warning("worker lost", worker=name, reason=reason)
        attention, compute = self._fleet.attention.pop(name, None), self._fleet.compute.get(name)
        if compute is not None:
            compute.alive = False
            compute.leaves |= leaves or attention is not None  # what held blocks can't come back: its group is gone
            self.fence(compute)
            if compute.standing in (Standing.REGISTERED, Standing.JOINED, Standing.LOST):
                self._end(compute)
        if attention is not None:
            self._lose_attention(name, attention)

    def returned(self, name: str) -> None:
        """A compute worker that was silent is heard of again."""
        compute = self._fleet.compute.get(name)
        if compute is None or compute.alive:
            return
        log.info("worker returned", worker=name)
        compute.alive = True
        if compute.standing is Standing.LOST:
            compute.standing = Standing.JOINED
            self._start(compute)

    def _start(self, compute: ComputeEntry) -> None:
        if compute.standing is Standing.JOINED and self._fleet.ready_groups():
            compute.session, compute.standing = next(self._next_session), Standing.STARTING
            self._tell(compute.hello.name, self._fleet.compute_assign(compute.hello.name))

    def _open_group(self, attention: AttentionEntry) -> None:
        assert attention.assign is not None
        group = attention.assign.group
        blocks = self._fleet.ready_groups().get(group)
        if blocks is None:
            return
        self._scheduler().add_group(group, blocks)
        log.info("group ready", group=group, blocks=blocks)
        for compute in list(self._fleet.compute.values()):
            self.fence(compute)  # its next session has the group too
            self._start(compute)

    def _lose_attention(self, name: str, attention: AttentionEntry) -> None:
        """The group is lost with its member; what is left of it is free to form another."""
        if attention.assign is not None:
            group = attention.assign.group
            self._deliver(self._scheduler().lose_group(group))
            for member in self._fleet.group_members(group):
                member.assign, member.standing = None, Standing.JOINED
        for compute in list(self._fleet.compute.values()):
            self.fence(compute)
            compute.fences.discard(name)  # of a fence that was under way
            self._end_if_fenced(compute)

    def _end_if_fenced(self, compute: ComputeEntry) -> None:
        if compute.standing is Standing.FENCING and not compute.fences:
            self._end(compute)

    def _end(self, compute: ComputeEntry) -> None:
        """Nothing of the session can be written any more: its steps are dropped, and what comes next begins."""
        failed, compute.failed = compute.failed, None
        if failed is not None and self._scheduler().lane_of(failed.step) in compute.lanes:
            self._deliver(self._scheduler().fail(failed.step, failed.reason))
        for lane in compute.lanes:
            if lane in self._scheduler().lanes:
                self._scheduler().remove_lane(lane)
        if compute.leaves:
            del self._fleet.compute[compute.hello.name]
            return
        compute.standing = Standing.JOINED if compute.alive else Standing.LOST
        self._start(compute)
