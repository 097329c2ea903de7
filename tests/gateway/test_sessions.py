"""Groups and sessions as workers come and go."""

from typing import Any

import pytest

from pannier.gateway.entries import Standing
from pannier.gateway.fleet import Fleet, FleetConfig
from pannier.gateway.sessions import Sessions
from pannier.runtime.errors import NotAccepted
from pannier.scheduler import Scheduler, SchedulerConfig
from pannier.wire import Dtype
from pannier.wire import messages as m

CALLS = (m.CallGeometry(4, 4, 8, 8, 1.0, 0, 0.0),)


class Gateway:
    """A fleet and its sessions; what workers are told is kept."""

    def __init__(
        self, attention_workers: int, heads_split: tuple[int, ...] | None = None, compute_workers: int = 1
    ) -> None:
        config = FleetConfig(1, "m", "d", compute_workers, attention_workers, 16, None, heads_split, 64)
        self.told: list[tuple[str, Any]] = []
        self.fleet = Fleet(config)
        self.scheduler = Scheduler(SchedulerConfig(max_model_len=64))
        self.sessions = Sessions(
            self.fleet, lambda: self.scheduler, lambda name, message: self.told.append((name, message)), lambda _: None
        )

    def join(self, name: str, stage: tuple[int, int] | None = None, lanes: int = 2) -> None:
        """A worker registers and joins; `stage` is (number, count)."""
        facts = None if stage is None else m.StageFacts(*stage, m.CallRange(0, 1), f"ipc://{name}")
        compute = m.ComputeFacts("m", "d", "cpu", "float32", Dtype.FLOAT32, lanes, CALLS, 100, 64, 0, facts)
        attention = m.AttentionFacts("cpu", 1 << 20, 1e9, (Dtype.FLOAT32,), f"ipc://{name}")
        roles = {"compute": (compute, None), "mono": (compute, attention)}
        hello = m.Hello(
            m.PROTOCOL, name, 1, 1, "h", "l", *roles.get(name.rpartition("-")[0] or name, (None, attention))
        )
        self.fleet.accept(hello)
        self.sessions.joined(name)

    def shard_ready(self, name: str, group: int) -> None:
        """An attention worker has allocated its shard."""
        self.sessions.ready(name, m.Ready(1, group, 0, ""))

    def session_ready(self, name: str) -> None:
        """A compute worker has its links in place."""
        session = self.fleet.compute[name].session
        assert session is not None
        self.sessions.ready(name, m.Ready(1, None, session.number, ""))

    def next_stages(self) -> dict[str, str | None]:
        """Who was told of which next stage, in the last assignment of each."""
        assigns = {name: message for name, message in self.told if isinstance(message, m.ComputeAssign)}
        return {name: None if (n := assign.next_stage) is None else n.name for name, assign in assigns.items()}

    def standing(self, name: str) -> Standing:
        """Where an attention worker stands."""
        return self.fleet.attention[name].standing


@pytest.fixture
def pair() -> Gateway:
    """A compute worker, and two attention workers that were assigned group 0."""
    gateway = Gateway(attention_workers=2)
    for name in ("compute", "a", "b"):
        gateway.join(name)
    assert [name for name, _ in gateway.told] == ["a", "b"]
    return gateway


def test_ready_for_a_lost_group_is_not_ready_for_the_next(pair: Gateway) -> None:
    """The answer to a former assignment may come after the next one was sent."""
    pair.sessions.lost("b", "gone", leaves=True)
    pair.join("c")
    pair.shard_ready("c", 1)
    pair.shard_ready("a", 0)
    assert pair.standing("a") is Standing.STARTING
    assert not pair.fleet.ready_groups()
    pair.shard_ready("a", 1)
    assert list(pair.fleet.ready_groups()) == [1]


def test_the_rest_of_a_lost_group_and_a_successor_form_another_beside_one_that_serves() -> None:
    """Not only when all the workers that were there at first are free again."""
    gateway = Gateway(attention_workers=4, heads_split=(3, 1))
    for name in ("compute", "a", "b", "c", "d"):
        gateway.join(name)
    for name in ("a", "b", "c", "d"):
        assign = gateway.fleet.attention[name].assign
        assert assign is not None
        gateway.shard_ready(name, assign.group)
    gateway.sessions.lost("a", "gone", leaves=True)
    assert list(gateway.fleet.ready_groups()) == [1]
    gateway.join("a")
    gateway.shard_ready("a", 2)
    gateway.shard_ready("b", 2)
    assert set(gateway.fleet.ready_groups()) == {1, 2}


def test_a_newcomer_that_a_split_leaves_over_waits_for_another() -> None:
    """It forms no group of its own, and isn't an error."""
    gateway = Gateway(attention_workers=2, heads_split=(3, 1))
    for name in ("compute", "a", "b", "c"):
        gateway.join(name)
    assert gateway.standing("c") is Standing.JOINED
    gateway.join("d")
    assert gateway.standing("c") is gateway.standing("d") is Standing.STARTING


def test_silence_is_counted_in_heartbeats_that_were_due(pair: Gateway) -> None:
    """However long the gateway itself has slept."""
    for _ in range(3):
        assert pair.fleet.silent(3) == []
        pair.fleet.seen("a", {})
    assert pair.fleet.silent(3) == ["b", "compute"]


def test_a_worker_that_is_gone_for_good_is_not_waited_for(pair: Gateway) -> None:
    """Even if its silence is noticed after its end."""
    pair.shard_ready("a", 0)
    pair.shard_ready("b", 0)
    pair.sessions.lost("compute", "its process was started again", leaves=True)
    pair.sessions.lost("compute", "silent", leaves=False)
    for name in ("a", "b"):
        pair.sessions.fenced(name, m.Fenced(1, "compute", 1))
    assert not pair.fleet.knows("compute")


@pytest.mark.parametrize(("first", "second"), [("mono-0", "mono-1"), ("mono-0", "compute"), ("a", "mono-0")])
def test_a_monolithic_worker_is_the_only_one(first: str, second: str) -> None:
    """Its blocks can't be reached from other processes: who would share a gateway with it is turned away."""
    gateway = Gateway(attention_workers=2)
    gateway.join(first)
    with pytest.raises(NotAccepted, match=f"{second} and {first} can't share a gateway"):
        gateway.join(second)


def test_ready_means_all_compute_workers_that_were_asked_for() -> None:
    """Requests are served with the first one; ready is said when all are there."""
    gateway = Gateway(attention_workers=1, compute_workers=2)
    for name in ("a", "compute-0", "compute-1"):
        gateway.join(name)
    gateway.shard_ready("a", 0)
    for name, complete in (("compute-0", False), ("compute-1", True)):
        gateway.session_ready(name)
        assert gateway.fleet.open_lanes()
        assert gateway.fleet.is_complete() is complete


def test_requests_are_taken_while_one_session_follows_another() -> None:
    """A group that comes late costs nobody an error; where nothing is to follow, requests are not kept waiting."""
    gateway = Gateway(attention_workers=1)
    for name in ("a", "compute-0"):
        gateway.join(name)
    assert not gateway.fleet.takes_requests()
    gateway.shard_ready("a", 0)
    gateway.session_ready("compute-0")
    gateway.join("b")
    gateway.shard_ready("b", 1)
    assert not gateway.fleet.open_lanes()
    assert gateway.fleet.takes_requests()
    for group in ("a", "b"):
        gateway.sessions.lost(group, "gone", leaves=True)
    assert not gateway.fleet.takes_requests()


def test_no_requests_are_taken_without_a_compute_worker() -> None:
    """Not even while its session is being fenced: a client had better ask elsewhere."""
    gateway = Gateway(attention_workers=1)
    for name in ("a", "compute-0"):
        gateway.join(name)
    gateway.shard_ready("a", 0)
    gateway.session_ready("compute-0")
    gateway.sessions.lost("compute-0", "gone", leaves=False)
    assert not gateway.fleet.takes_requests()


def staged() -> Gateway:
    """A replica of two stages that serves, and a first stage too many."""
    gateway = Gateway(attention_workers=1, compute_workers=3)
    gateway.join("a")
    for name, number in (("compute-0", 0), ("compute-1", 0), ("compute-2", 1)):
        gateway.join(name, (number, 2))
    gateway.shard_ready("a", 0)
    for name in ("compute-0", "compute-2"):
        gateway.session_ready(name)
    return gateway


def test_stages_begin_together_in_a_ring() -> None:
    """The lanes open once all of them are ready; who lacks a partner waits for one."""
    gateway = staged()
    assert gateway.next_stages() == {"compute-0": "compute-2", "compute-2": "compute-0"}
    assert len(gateway.fleet.sessions()) == 1
    assert gateway.fleet.open_lanes() == [0, 1]
    assert gateway.fleet.compute["compute-1"].standing is Standing.JOINED


def test_a_lost_stage_fences_the_whole_replica_and_its_partner_goes_on_with_another() -> None:
    """Both stages may have written; nothing begins before both are fenced."""
    gateway = staged()
    gateway.sessions.lost("compute-0", "gone", leaves=True)
    fences = [message.compute for _, message in gateway.told if isinstance(message, m.Fence)]
    assert sorted(fences) == ["compute-0", "compute-2"]
    gateway.sessions.fenced("a", m.Fenced(1, "compute-2", 1))
    assert gateway.fleet.knows("compute-0")
    assert not gateway.fleet.open_lanes()
    gateway.sessions.fenced("a", m.Fenced(1, "compute-0", 1))
    assert not gateway.fleet.knows("compute-0")
    assert gateway.next_stages()["compute-1"] == "compute-2"
    for name in ("compute-1", "compute-2"):
        gateway.session_ready(name)
    assert gateway.fleet.open_lanes() == [2, 3]


def test_stages_that_could_never_compute_together_are_refused() -> None:
    """Lanes are common to all of them."""
    gateway = staged()
    with pytest.raises(NotAccepted, match="compute-3 has 3 lanes, and other stages have 2: give all the same"):
        gateway.join("compute-3", (1, 2), lanes=3)
    with pytest.raises(NotAccepted, match="compute-3 runs stage 2 of 2; they are counted from 0"):
        gateway.join("compute-3", (2, 2))
    gateway.join("compute-3", (2, 3), lanes=3)
    gateway.join("compute-4")
