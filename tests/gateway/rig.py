"""An engine between a scheduler by hand and a client that keeps what it is sent."""

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from pannier.gateway.admission import Admission
from pannier.gateway.engine import Engine
from pannier.gateway.entries import ComputeEntry, Session, Standing
from pannier.gateway.fleet import Fleet, FleetConfig
from pannier.gateway.text import Text
from pannier.net import PeerGone
from pannier.scheduler import Inconsistent, Output, Rejected, Request, Scheduler, SchedulerConfig, Step, Unplanned
from pannier.wire import Dtype
from pannier.wire import messages as m

LIFE, SESSION = 77, 3
LANE = 2
"""The only lane: number 0 of its compute worker."""
VOCAB, WINDOW = 100, 64
TIMES = m.StepTimes(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


@dataclass
class Pool:
    """As much of a block pool as the engine looks at."""

    total: int = 16


class FakeScheduler:
    """Takes requests, and gives back what the test has prepared."""

    def __init__(self) -> None:
        self.config = SchedulerConfig(max_model_len=WINDOW, block_size=16)
        self.pools = {0: Pool()}
        self.requests: list[Request] = []
        self.cancelled: list[int] = []
        self.finished: list[int] = []
        self.steps: deque[Step] = deque()
        self.outputs: list[Output] = []
        self.committed: list[Any] = []
        self.expired: list[Output] = []
        self.asked_at: list[float] = []
        self.preempted: list[int] = []
        self.states_of: list[int] = []
        self.is_idle = False
        self.num_checks = 0
        self.wrong: str | None = None

    def add(self, request: Request) -> None:
        if len(self.requests) == 3:
            raise Rejected("overloaded", None, "3 requests wait already")
        self.requests.append(request)

    def cancel(self, sequence: int) -> None:
        self.cancelled.append(sequence)

    def finish(self, sequence: int) -> None:
        self.finished.append(sequence)

    def schedule(self, lane: int) -> Step | None:
        assert lane == LANE
        return self.steps.popleft() if self.steps else None

    def lane_of(self, step: int) -> int | None:
        return LANE if step < 100 else None

    def commit(self, step: int, drawn: Sequence[m.Drawn], scored: Sequence[m.Scored]) -> list[Output]:
        self.committed.append((step, drawn, scored))
        outputs, self.outputs = self.outputs, []
        return outputs

    def step_with_states(self, number: int) -> Step:
        if number != 5:
            raise Unplanned(f"step {number} is not the next")
        self.states_of.append(number)
        return step(number, states=(m.SamplerState(1, m.SamplerRules(), (1, 2), ()),))

    def expire(self, now: float) -> list[Output]:
        self.asked_at.append(now)
        expired, self.expired = self.expired, []
        return expired

    def take_preemptions(self) -> list[int]:
        taken, self.preempted = self.preempted, []
        return taken

    def check(self) -> None:
        self.num_checks += 1
        if self.wrong is not None:
            raise Inconsistent(self.wrong)


def step(number: int, **fields: Any) -> Step:
    """A step of the only lane, empty but for what is given."""
    empty: dict[str, Any] = dict.fromkeys(Step.__dataclass_fields__, ())
    ints = {name: array("i") for name in ("token_ids", "blocks", "scored_tokens")}
    return Step(**{**empty, **ints, "step": number, "lane": LANE, **fields})


class EngineRig:
    """The engine with everything around it; `text` None: no tokenizer."""

    def __init__(self, text: Text | None = None) -> None:
        self.scheduler = FakeScheduler()
        self.now = 1000.0
        self.steps: list[tuple[str, m.Step, bytes]] = []
        self.sent: list[Any] = []
        self.ends: list[bool] = []
        self.has_left = False
        admission = Admission(model="ox", text=text, vocab_size=VOCAB, max_model_len=WINDOW, max_sequences=8)
        self.engine = Engine(
            cast(Scheduler, self.scheduler),
            _fleet(),
            admission,
            lambda name, message, payload: self.steps.append((name, message, bytes(payload))),
            self._send,
            clock=lambda: self.now,
        )

    def _send(self, _: bytes, message: Any, is_end: bool) -> None:
        if self.has_left and not is_end:
            raise PeerGone("a peer reads nothing")
        self.sent.append(message)
        self.ends.append(is_end)

    def generate(
        self, request: str = "r", *, priority: int = 0, deadline_s: float | None = None, **params: Any
    ) -> Request:
        """Admit a request of three tokens; what the scheduler was given."""
        sampling = m.SamplingParams(**params)
        message = m.Generate(request, None, None, (1, 2, 3), None, sampling, priority=priority, deadline_s=deadline_s)
        self.engine.generate(b"client", message)
        return self.scheduler.requests[-1]

    def commit(self, *outputs: Output, step: int = 5, scored: tuple[m.Scored, ...] = ()) -> list[Any]:
        """A step is done, and this is what it means; what clients were sent of it."""
        self.scheduler.outputs = list(outputs)
        before = len(self.sent)
        self.engine.commit(LANE, m.StepDone(LIFE, SESSION, step, 0, (), scored, TIMES))
        return self.sent[before:]


def output(sequence: int, token: int = 7, finish_reason: str | None = None, **fields: Any) -> Output:
    """A token of a sequence."""
    return Output(sequence, m.Drawn(sequence, token, None, ()), finish_reason, **fields)


def _fleet() -> Fleet:
    calls = (m.CallGeometry(4, 4, 8, 8, 1.0, 0, 0.0),)
    facts = m.ComputeFacts("ox", "d", "cpu", "float32", Dtype.FLOAT32, 1, calls, VOCAB, WINDOW, 0)
    hello = m.Hello(m.PROTOCOL, "compute", 1, 1, "h", "l", facts, None)
    fleet = Fleet(FleetConfig(LIFE, "ox", "d", 1, 1, 16, None, None, 64))
    entry = fleet.compute["compute"] = ComputeEntry(hello, facts, LANE, joined=True)
    entry.session = Session(SESSION, (entry,), Standing.READY)
    return fleet
