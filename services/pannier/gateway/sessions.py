"""Sessions of compute workers: when they start, how they are fenced, what a lost worker means. No I/O.

Compute workers that together run the whole model (one, or one of each stage) form a session for as long as it lasts;
when it has ended, whoever is left may form another with others.

A session ends with a fence: every attention worker says that nothing of it can be written any more. Only then are its
steps dropped, so that blocks are never given to others while a late write may be under way. The next session starts
with the groups there are then. The same serves a step that failed, a link that was lost and a group that came or went:
rare events, so one way through all of them, with a step or two repeated, is worth more than a shorter one for each.
"""

from collections.abc import Callable
from itertools import count

import structlog

from pannier.gateway.entries import AttentionEntry, ComputeEntry, Session, Standing
from pannier.gateway.fleet import Fleet
from pannier.runtime.errors import ConfigError
from pannier.scheduler import Output, Scheduler
from pannier.wire import GatewayToWorkerData
from pannier.wire import messages as m

MAX_LOST_LINKS = 3
"""Sessions in a row that may end with a lost link before any step is done: then the two can't talk to each other."""
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
            log.info(
                "group", number=assign.group, worker=worker, kv=assign.kv_dtype.name.lower(),
                links=assign.wire_dtype.name.lower(),
            )  # fmt: skip
            self._tell(worker, assign)
        self._start()

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
        session = compute.session
        if session is None or (session.standing, session.number) != (Standing.STARTING, ready.session):
            return
        compute.detail = ready.detail
        session.unready.discard(compute.hello.name)
        if session.unready:
            return
        session.standing = Standing.READY
        for lane in session.lanes:
            self._scheduler().add_lane(lane)
        log.info("session started", workers=session.names, session=session.number, links=ready.detail)

    def fence(self, session: Session) -> None:
        """End a session; the next one starts when every attention worker has acknowledged."""
        if session.standing is Standing.FENCING:
            return
        session.standing = Standing.FENCING
        # Also those that hold nothing now: what is left of a lost group knows the session.
        known = [name for name, e in self._fleet.attention.items() if e.standing is not Standing.REGISTERED]
        session.fences = {(attention, compute) for attention in known for compute in session.names}
        log.warning("session fenced", workers=session.names, session=session.number)
        for attention, compute in sorted(session.fences):
            self._tell(attention, m.Fence(self._fleet.config.life, compute, session.number))
        self._end_if_fenced(session)

    def failed(self, session: Session, failed: m.StepFailed) -> None:
        """A step can't be done: its requests end with an error, once nothing of it can be written any more."""
        session.failed = failed
        self.fence(session)

    def link_lost(self, name: str, lost: m.LinkLost) -> bool:
        """A compute worker has lost a link, or never had it: the next session, which links anew, repeats its steps.

        False, and nothing has changed, if that has been tried often enough.
        """
        compute = self._fleet.compute.get(name)
        session = compute.session if compute is not None else None
        if compute is None or session is None or session.number != lost.session or session.standing is Standing.FENCING:
            return True
        log.warning("link lost", worker=name, to=lost.worker, session=session.number, reason=lost.reason)
        was_needed = any(lane in session.lanes for lane in self._scheduler().under_way)
        compute.lost_links += was_needed or session.standing is Standing.STARTING
        if compute.lost_links == MAX_LOST_LINKS:
            return False
        self.fence(session)
        return True

    def fenced(self, name: str, fenced: m.Fenced) -> None:
        """An attention worker has acknowledged a fence."""
        compute = self._fleet.compute.get(fenced.compute)
        if compute is not None and compute.session is not None and compute.session.number == fenced.session:
            compute.session.fences.discard((name, fenced.compute))
            self._end_if_fenced(compute.session)

    def lost(self, name: str, reason: str, *, leaves: bool) -> None:
        """Nothing more is to be expected of a worker: for now, or (it `leaves`) for good."""
        log.warning("worker lost", worker=name, reason=reason)
        attention, compute = self._fleet.attention.pop(name, None), self._fleet.compute.get(name)
        if compute is not None:
            compute.alive = False
            compute.leaves |= leaves or attention is not None  # what held blocks can't come back: its group is gone
            if compute.session is not None:
                self.fence(compute.session)
            elif compute.leaves:
                self._forget(compute)
        if attention is not None:
            self._lose_attention(name, attention)

    def returned(self, name: str) -> None:
        """A compute worker that was silent is heard of again."""
        compute = self._fleet.compute.get(name)
        if compute is None or compute.alive:
            return
        log.info("worker returned", worker=name)
        compute.alive = True
        self._start()

    def _start(self) -> None:
        """Begin a session with every set of compute workers that can run the model, if there is somewhere to attend."""
        while self._fleet.ready_groups() and (workers := self._fleet.next_replica()):
            session = Session(next(self._next_session), workers)
            session.unready = set(session.names)
            for worker in workers:
                worker.session = session
            for worker in workers:
                self._tell(worker.hello.name, self._fleet.compute_assign(session, worker))

    def _open_group(self, attention: AttentionEntry) -> None:
        assert attention.assign is not None
        group = attention.assign.group
        blocks = self._fleet.ready_groups().get(group)
        if blocks is None:
            return
        self._scheduler().add_group(group, blocks)
        log.info("group ready", group=group, blocks=blocks)
        for session in self._fleet.sessions():
            self.fence(session)  # the next one has the group too
        self._start()

    def _lose_attention(self, name: str, attention: AttentionEntry) -> None:
        """The group is lost with its member; what is left of it is free to form another."""
        if attention.assign is not None:
            group = attention.assign.group
            self._deliver(self._scheduler().lose_group(group))
            for member in self._fleet.group_members(group):
                member.assign, member.standing = None, Standing.JOINED
        for session in self._fleet.sessions():
            self.fence(session)
            session.fences = {fence for fence in session.fences if fence[0] != name}  # of one that was under way
            self._end_if_fenced(session)

    def _end_if_fenced(self, session: Session) -> None:
        is_over = session.workers[0].session is not session
        if session.standing is Standing.FENCING and not session.fences and not is_over:
            self._end(session)

    def _end(self, session: Session) -> None:
        """Nothing of the session can be written any more: its steps are dropped, and what comes next begins."""
        failed = session.failed
        if failed is not None and self._scheduler().lane_of(failed.step) in session.lanes:
            self._deliver(self._scheduler().fail(failed.step, failed.reason))
        for lane in session.lanes:
            if lane in self._scheduler().lanes:
                self._scheduler().remove_lane(lane)
        for worker in session.workers:
            worker.session = None
            if worker.leaves:
                self._forget(worker)
        self._start()

    def _forget(self, compute: ComputeEntry) -> None:
        del self._fleet.compute[compute.hello.name]
