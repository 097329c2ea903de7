"""What the gateway makes of what workers and clients say, whoever they are."""

import asyncio
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from pannier.gateway.engine import Engine
from pannier.gateway.entries import Standing
from pannier.gateway.service import GIVE_UP_AFTER
from pannier.gateway.sessions import MAX_LOST_LINKS
from pannier.net import PeerGone
from pannier.runtime.config import GatewayConfig
from pannier.runtime.errors import ConfigError
from pannier.runtime.model_source import resolve
from pannier.wire import Buffer, Dtype
from pannier.wire import messages as m
from tests.interleaving.gateway import Gateway

MODEL = "random:llama-135m"
CALLS = (m.CallGeometry(4, 4, 8, 8, 1.0, 0, 0.0),)
VOCAB, WINDOW = 100, 64
TIMES = m.StepTimes(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


class Rig:
    """A gateway, one compute worker with two lanes and one attention worker by hand."""

    def __init__(self) -> None:
        self.sent: dict[str, list[tuple[str, Any]]] = {"control": [], "data": [], "clients": []}
        self.gone: set[str] = set()
        config = GatewayConfig(model=MODEL, block_size=16, max_batch_tokens=64)
        self.gateway = Gateway(config, 0, {name: self._sends(name) for name in self.sent})
        self.service = self.gateway.service
        self.life = self.service.life

    @property
    def engine(self) -> Engine:
        """Its engine."""
        assert self.service.engine is not None
        return self.service.engine

    def _sends(self, socket: str) -> Any:
        def send(peer: bytes, message: Any, _payload: Buffer | None) -> None:
            if socket == "data" and peer.decode() in self.gone:
                raise PeerGone("not there")
            if socket == "clients" and peer.decode() in self.gone and isinstance(message, m.Delta):
                raise PeerGone("a peer reads nothing")
            self.sent[socket].append((peer.decode(errors="surrogateescape"), message))

        return send

    def last(self, socket: str, kind: type[Any]) -> Any:
        """The last message of a kind that was sent on a socket."""
        return next(message for _, message in reversed(self.sent[socket]) if isinstance(message, kind))

    def count(self, socket: str, kind: type[Any]) -> int:
        """How many messages of a kind were sent on a socket."""
        return sum(isinstance(message, kind) for _, message in self.sent[socket])

    def hello(self, name: str, *, start: int = 1, lanes: int = 2, memory: int = 1 << 20, window: int = WINDOW) -> None:
        """A worker says hello; which role it has, its name says."""
        compute = m.ComputeFacts(
            MODEL, resolve(MODEL).digest, "cpu", "float32", Dtype.FLOAT32, lanes, CALLS, VOCAB, window, 0
        )
        attention = m.AttentionFacts("cpu", memory, 1e9, (Dtype.FLOAT32,), f"ipc://{name}")
        is_compute = name.startswith("compute")
        facts = (compute, None) if is_compute else (None, attention)
        self.gateway.hand("control", name, m.Hello(m.PROTOCOL, name, start, 1, "h", "l", *facts))

    def join(self, name: str) -> None:
        """Its data thread has dialled."""
        self.gateway.hand("data", name, m.Join(self.life))

    def serve(self) -> None:
        """Bring the stack up."""
        for name in ("compute", "attention"):
            self.hello(name)
            self.join(name)
        self.gateway.hand("data", "attention", m.Ready(self.life, 0, 0, ""))
        self.session_ready()
        assert self.service.fleet.open_lanes() == [0, 1]

    def session_ready(self) -> None:
        """The compute worker has linked to what it was told last."""
        self.gateway.hand(
            "data", "compute", m.Ready(self.life, None, self.last("data", m.ComputeAssign).session, "zmq")
        )

    def heartbeat(self, name: str) -> None:
        """A worker is alive."""
        self.gateway.hand("control", name, m.Heartbeat(self.life, {}))

    def beat(self, *names: str) -> None:
        """A second passes in which these workers, or both, are alive."""
        for name in names or ("compute", "attention"):
            self.heartbeat(name)
        self.service.beat()

    def oldest(self) -> m.Step:
        """The step that must be done first."""
        number = min(self.engine.scheduler.under_way.values())
        return next(step for _, step in self.sent["data"] if isinstance(step, m.Step) and step.step == number)

    def fenced(self) -> None:
        """The attention worker acknowledges the last fence."""
        fence = self.last("data", m.Fence)
        self.gateway.hand("data", "attention", m.Fenced(self.life, fence.compute, fence.session))

    def link_lost(self) -> None:
        """The compute worker has lost a link of the last session, which is fenced."""
        session = self.last("data", m.ComputeAssign).session
        self.gateway.hand("data", "compute", m.LinkLost(self.life, session, "attention", "tcp://a:1: reset"))
        self.fenced()

    def generate(self, request: str = "r", max_tokens: int = 1, **params_: Any) -> None:
        """A client asks for greedy tokens."""
        params = m.SamplingParams(max_tokens=max_tokens, temperature=0.0, **params_)
        self.gateway.hand("clients", "client", m.Generate(request, None, None, (1, 2, 3), None, params))

    def done(self, step: m.Step, /, **changed: Any) -> m.StepDone:
        """What becomes of a step that is done."""
        drawn = tuple(m.Drawn(sample.sequence, 7, None, ()) for sample in step.samples)
        done = m.StepDone(self.life, step.session, step.step, step.lane, drawn, (), TIMES)
        return msgspec.structs.replace(done, **changed)


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.gateway.close()


NONSENSE: dict[str, dict[str, Any]] = {
    "unknown step": {"step": 1 << 60},
    "another lane": {"lane": 1},
    "no lane": {"lane": 12345},
    "too few draws": {"drawn": ()},
    "another sequence": {"drawn": (m.Drawn(99, 7, None, ()),)},
    "no token": {"drawn": (m.Drawn(1, 1 << 40, None, ()),)},
}


@pytest.mark.parametrize("changed", NONSENSE.values(), ids=NONSENSE)
def test_a_step_done_that_nobody_asked_for_ends_the_session_only(rig: Rig, changed: dict[str, Any]) -> None:
    """The gateway goes on; the request fails if its own step was answered wrongly, else its step is repeated."""
    rig.serve()
    rig.generate()
    rig.gateway.hand("data", "compute", rig.done(rig.last("data", m.Step), **changed))
    rig.fenced()
    rig.session_ready()
    if not rig.count("clients", m.Failed):
        rig.gateway.hand("data", "compute", rig.done(rig.last("data", m.Step)))
        assert rig.last("clients", m.Delta).finish_reason == "length"
    assert len(rig.engine.streams) == 0
    rig.engine.scheduler.check()


def test_a_worker_that_lacks_the_past_is_sent_the_step_again(rig: Rig) -> None:
    """With the states of its sequences, in the same session; then it is done like any other."""
    rig.serve()
    rig.generate(repetition_penalty=1.5)
    step = rig.last("data", m.Step)
    rig.gateway.hand("data", "compute", m.NeedState(rig.life, step.session, step.step, step.lane, (1,)))
    again = rig.last("data", m.Step)
    assert again is not step
    assert (again.step, again.session, again.lane, again.samples) == (step.step, step.session, 0, step.samples)
    assert [state.prompt_tokens for state in again.states] == [(1, 2, 3)]
    rig.gateway.hand("data", "compute", rig.done(again))
    assert rig.last("clients", m.Delta).finish_reason == "length"


def test_a_worker_that_asks_for_the_past_of_no_step_is_fenced(rig: Rig) -> None:
    """As one that did a step that nobody asked for."""
    rig.serve()
    rig.generate()
    step = rig.last("data", m.Step)
    rig.gateway.hand("data", "compute", m.NeedState(rig.life, step.session, 1 << 60, step.lane, (1,)))
    assert rig.count("data", m.Fence) == 1


def test_the_status_says_where_every_block_is(rig: Rig) -> None:
    """For each group; and that the books balanced whenever nothing was left to do."""
    rig.serve()
    rig.generate()
    (blocks,) = status(rig)["groups"].values()
    assert blocks["used"] > 0
    assert blocks["free"] + blocks["used"] + blocks["cached"] == blocks["total"]
    rig.gateway.hand("data", "compute", rig.done(rig.last("data", m.Step)))
    found = status(rig)
    assert found["groups"]["0"]["used"] == 0
    assert (found["accounting_errors"], found["preemptions"]) == (0, 0)
    assert found["requests"] == {"reading": 0, "running": 0, "waiting": 0}


def status(rig: Rig) -> dict[str, Any]:
    """What a client is told."""

    async def ask() -> None:  # it names the event loop
        rig.gateway.hand("clients", "client", m.GetStatus("s"))

    asyncio.run(ask())
    found: dict[str, Any] = rig.last("clients", m.Status).status
    return found


def test_deadlines_are_looked_at_ten_times_a_second(rig: Rig) -> None:
    """Whatever the heartbeat is; the request ends with a code of its own, and its blocks are free."""
    rig.serve()
    params = m.SamplingParams(max_tokens=9)
    rig.gateway.hand("clients", "client", m.Generate("r", None, None, (1,), None, params, deadline_s=0.05))

    async def watch() -> None:
        watching = asyncio.ensure_future(rig.service._watch_deadlines())
        await asyncio.sleep(0.3)
        watching.cancel()

    asyncio.run(watch())
    failed = rig.last("clients", m.Failed)
    assert (failed.request, failed.code) == ("r", "timeout")
    while rig.engine.scheduler.under_way:
        rig.gateway.hand("data", "compute", rig.done(rig.oldest()))
    assert rig.engine.scheduler.is_idle


def test_a_step_that_another_worker_calls_failed_goes_on(rig: Rig) -> None:
    """A failure ends requests only if the step was that worker's own."""
    rig.serve()
    rig.hello("compute-b")
    rig.join("compute-b")
    assign = rig.last("data", m.ComputeAssign)
    rig.gateway.hand("data", "compute-b", m.Ready(rig.life, None, assign.session, "zmq"))
    rig.generate()
    step = rig.last("data", m.Step)
    assert rig.sent["data"][-1][0] == "compute"
    rig.gateway.hand("data", "compute-b", m.StepFailed(rig.life, assign.session, step.step, 0, "nonsense"))
    rig.fenced()
    rig.gateway.hand("data", "compute", rig.done(step))
    assert rig.last("clients", m.Delta).finish_reason == "length"


@pytest.mark.parametrize("name", ["attention", "compute"])
def test_what_a_worker_has_no_business_to_say_changes_nothing(rig: Rig, name: str) -> None:
    """Outcomes of steps from an attention worker, a shard that is ready from a compute worker, joining twice."""
    rig.serve()
    rig.generate()
    told = len(rig.sent["data"])
    step = rig.last("data", m.Step)
    rig.join(name)
    other = "attention" if name == "compute" else "compute"
    rig.gateway.hand("data", "attention", rig.done(step))
    rig.gateway.hand("data", "attention", m.StepFailed(rig.life, step.session, step.step, 0, "nonsense"))
    rig.gateway.hand("data", name, m.Ready(rig.life, 12, 0, ""))
    rig.gateway.hand("data", name, m.Fenced(rig.life, other, 9))
    assert len(rig.sent["data"]) == told
    assert rig.service.fleet.compute["compute"].standing is Standing.READY
    rig.gateway.hand("data", "compute", rig.done(step))
    assert rig.last("clients", m.Delta).finish_reason == "length"


def test_a_worker_that_returns_is_accepted_when_the_last_fence_falls_away(rig: Rig) -> None:
    """Also when no acknowledgement ends it, but the loss of the attention worker that owed it."""
    rig.serve()
    rig.hello("compute", start=2)
    assert rig.count("control", m.Welcome) == 2
    rig.gateway.silent("attention")
    assert rig.count("control", m.Welcome) == 3
    rig.hello("attention", start=2)
    rig.hello("compute", start=3)
    assert rig.count("control", m.Welcome) == 5


@pytest.mark.parametrize("facts", [{"lanes": 0}, {"lanes": -1}, {"lanes": 1 << 40}, {"window": 1}])
def test_a_worker_that_cannot_be_used_is_refused(rig: Rig, facts: dict[str, int]) -> None:
    """With a reason, whatever numbers it gives; the next one is accepted."""
    rig.hello("compute", **facts)
    assert rig.count("control", m.Refused) == 1
    rig.serve()


def test_a_newcomer_that_can_hold_nothing_hinders_nobody(rig: Rig) -> None:
    """Only the first attention workers must be able to hold the model's cache."""
    rig.serve()
    rig.hello("attention-b", memory=1)
    rig.join("attention-b")
    rig.generate()
    rig.gateway.hand("data", "compute", rig.done(rig.last("data", m.Step)))
    assert rig.last("clients", m.Delta).finish_reason == "length"


def test_first_workers_that_cannot_hold_the_cache_end_the_gateway(rig: Rig) -> None:
    """There is nothing that it could serve."""
    rig.hello("compute")
    rig.join("compute")
    rig.hello("attention", memory=1)
    with pytest.raises(ConfigError, match="can't hold one block of"):
        rig.join("attention")


def test_a_step_that_never_reached_its_worker_is_repeated(rig: Rig) -> None:
    """Though the worker's heart beats: its data channel alone was broken, as long as it took to dial again."""
    rig.serve()
    rig.gone.add("compute")
    rig.generate()
    assert not rig.count("data", m.Step)
    rig.service.beat()
    rig.fenced()
    rig.heartbeat("compute")  # its new session can't be told either
    assert rig.count("data", m.ComputeAssign) == 1
    rig.gone.clear()
    rig.service.beat()
    rig.fenced()
    rig.heartbeat("compute")
    rig.session_ready()
    rig.gateway.hand("data", "compute", rig.done(rig.last("data", m.Step)))
    assert rig.last("clients", m.Delta).finish_reason == "length"


def test_an_attention_worker_that_cannot_be_fenced_is_lost(rig: Rig) -> None:
    """Nobody waits for its acknowledgement; its requests end, and it is told to start again."""
    rig.serve()
    rig.generate()
    step = rig.last("data", m.Step)
    rig.gone.add("attention")
    rig.gateway.hand("data", "compute", m.StepFailed(rig.life, step.session, step.step, 0, "out of memory"))
    rig.service.beat()
    assert rig.count("clients", m.Failed) == 1
    rig.heartbeat("attention")
    assert rig.count("control", m.Refused) == 1


def test_a_step_whose_link_is_lost_is_repeated(rig: Rig) -> None:
    """At once, in a session that links anew; nobody else loses anything, and what is said of the old one is stale."""
    rig.serve()
    rig.generate()
    old = rig.last("data", m.Step)
    rig.link_lost()
    rig.gateway.hand("data", "compute", m.LinkLost(rig.life, old.session, "attention", "late"))
    rig.session_ready()
    step = rig.last("data", m.Step)
    assert step.session > old.session
    rig.gateway.hand("data", "compute", rig.done(step))
    assert rig.last("clients", m.Delta).finish_reason == "length"
    assert not rig.count("clients", m.Failed)


def test_links_that_are_lost_while_nobody_needs_them_are_made_again_for_ever(rig: Rig) -> None:
    """As some networks cut what is idle."""
    rig.serve()
    for _ in range(3 * MAX_LOST_LINKS):
        rig.link_lost()
        rig.session_ready()
    assert rig.service.fleet.open_lanes() == [0, 1]


@pytest.mark.parametrize("comes_up", [True, False])
def test_two_that_cannot_talk_to_each_other_end_the_requests_with_the_reason(rig: Rig, comes_up: bool) -> None:
    """The compute worker is told too, and ends; whether its link never comes up or breaks before any step is done."""
    rig.serve()
    rig.generate()
    for tries in range(MAX_LOST_LINKS):
        assert not rig.count("clients", m.Failed)
        rig.link_lost()
        if comes_up and tries + 1 < MAX_LOST_LINKS:
            rig.session_ready()
    reason = "compute can't reach attention (tcp://a:1: reset)"
    assert rig.last("clients", m.Failed).reason == rig.last("control", m.Refused).reason == reason
    assert not rig.service.fleet.knows("compute")
    assert rig.engine.scheduler.is_idle


def test_a_step_that_is_done_shows_that_links_carry(rig: Rig) -> None:
    """Losses long before it don't count."""
    rig.serve()
    rig.generate(max_tokens=2 * MAX_LOST_LINKS)
    for _ in range(2 * MAX_LOST_LINKS):
        rig.link_lost()
        rig.session_ready()
        rig.gateway.hand("data", "compute", rig.done(rig.oldest()))
    assert rig.last("clients", m.Delta).finish_reason == "length"


def test_hello_said_again_by_the_same_process_is_welcomed_again(rig: Rig) -> None:
    """And changes nothing, whatever it does by now; another process of that name takes its place."""
    rig.serve()
    rig.hello("compute")
    rig.hello("attention")
    assert rig.count("control", m.Welcome) == 4
    assert rig.service.fleet.open_lanes() == [0, 1]
    rig.hello("compute", start=2)
    assert rig.service.fleet.open_lanes() == []


def test_a_step_that_is_never_done_fails(rig: Rig) -> None:
    """Every heart beats, but a frame was lost somewhere: its requests end, and those that wait are served."""
    rig.serve()
    rig.generate("stuck")
    for _ in range(GIVE_UP_AFTER):
        rig.beat()
    assert not rig.count("clients", m.Failed)
    rig.beat()
    rig.fenced()
    assert rig.last("clients", m.Failed).request == "stuck"
    rig.session_ready()
    rig.generate("next")
    rig.gateway.hand("data", "compute", rig.done(rig.last("data", m.Step)))
    assert rig.last("clients", m.Delta).request == "next"


def test_slow_steps_are_waited_for(rig: Rig) -> None:
    """Patience begins anew with each step."""
    rig.serve()
    rig.generate(max_tokens=5)
    for _ in range(4):
        for _ in range(GIVE_UP_AFTER):
            rig.beat()
        rig.gateway.hand("data", "compute", rig.done(rig.oldest()))
    assert not rig.count("data", m.Fence)


def test_requests_end_when_no_compute_worker_comes_back(rig: Rig) -> None:
    """With one clear error, after a while; their blocks are free for others when one does come."""
    rig.serve()
    rig.generate()
    rig.gateway.silent("compute")
    rig.fenced()
    for _ in range(GIVE_UP_AFTER + 1):
        rig.beat("attention")
    assert rig.last("clients", m.Failed).code == "unavailable"
    assert rig.engine.scheduler.is_idle
    rig.engine.scheduler.check()


def test_a_client_that_stops_reading_is_told_of_all_its_requests(rig: Rig) -> None:
    """Each ends with one clear error, should it read on, and their blocks are free."""
    rig.serve()
    for request in ("a", "b", "c"):
        rig.generate(request, max_tokens=9)
    rig.gone.add("client")
    rig.gateway.hand("data", "compute", rig.done(rig.oldest()))
    assert [(each.request, each.reason) for _, each in rig.sent["clients"]] == [
        (request, "a peer reads nothing") for request in ("a", "b", "c")
    ]
    while rig.engine.scheduler.under_way:
        rig.gateway.hand("data", "compute", rig.done(rig.oldest()))
    assert rig.engine.scheduler.is_idle


def test_messages_of_another_life_or_from_strangers_are_counted(rig: Rig) -> None:
    """They change nothing, and the status says how many there were."""
    rig.serve()
    rig.gateway.hand("data", "compute", m.Join(rig.life + 1))
    rig.gateway.hand("data", "stranger", m.Join(rig.life))
    assert rig.service.stale_frames == 2
    assert rig.service.fleet.open_lanes() == [0, 1]


def test_a_worker_without_a_proper_name_is_told(rig: Rig) -> None:
    """Also one whose socket has a name that is no text, as ZeroMQ gives them."""
    nameless = "\x00\udc80"
    hello = m.Hello(m.PROTOCOL, "compute", 1, 1, "h", "l", None, None)
    rig.gateway._servers["control"].arrive(b"\x00\x80", hello)
    rig.gateway._loops["control"].send(None)
    ((peer, message),) = rig.sent["control"]
    assert (peer, "must bear its name" in message.reason) == (nameless, True)
