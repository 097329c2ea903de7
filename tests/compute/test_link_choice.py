"""Which link reaches an attention worker, and links over plain TCP: pieces take turns, the lost are noticed."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq

from pannier.attention.core import AttentionCore
from pannier.attention.worker import AttentionWorker
from pannier.compute.link import Link, Received
from pannier.compute.link_choice import LinkChoice
from pannier.compute.link_sizes import LinkSizes, link_sizes
from pannier.net import SocketOptions, bind, close_bound
from pannier.net.keys import make_keys, worker_keys
from pannier.net.shm import CannotShare, Waiting, functions
from pannier.net.tcp import CannotTalk
from pannier.runtime.threads import StopSignal
from pannier.slicer import SlicedModel
from pannier.wire import Dtype
from pannier.wire import messages as m
from pannier.wire.traffic import Traffic

pytestmark = pytest.mark.timeout(60)
PATIENCE_S = 15.0
LIFE = 3
try:
    functions()
except CannotShare:  # as on a machine without a compiler
    BEST = "tcp"
else:
    BEST = "shm"


def _geometry(model: SlicedModel) -> tuple[m.CallGeometry, ...]:
    return tuple(
        m.CallGeometry(c.q_heads, c.kv_heads, c.k_size, c.v_size, c.scale, c.window, c.softcap) for c in model.calls
    )


def _heads(model: SlicedModel) -> tuple[m.HeadRange, ...]:
    return tuple(m.HeadRange(0, call.kv_heads) for call in model.calls)


class Rig:
    """An attention worker whose loop runs in a thread, and a compute worker's choice of links to it."""

    def __init__(self, worker: AttentionWorker, model: SlicedModel, context: Any) -> None:
        self.worker = worker
        self.waiting = Waiting(0)
        self._context = context
        self._model = model
        self.assign = m.ComputeAssign(LIFE, 1, (), 64, 16)

    def address(self, **changed: str) -> m.ShardAddress:
        at = {"endpoint": self.worker.endpoint, "door": self.worker.door, "tcp": self.worker.tcp} | changed
        return m.ShardAddress("a0", at["endpoint"], _heads(self._model), at["door"], at["tcp"])

    def choice(self, wanted: Any = "auto", flows: int = 1, options: SocketOptions = SocketOptions()) -> LinkChoice:
        return LinkChoice(self._context, self.waiting, "c0", self._model, 2, wanted, flows, options, Traffic())

    @contextmanager
    def link(self, choice: LinkChoice, **changed: str) -> Iterator[tuple[Link, str]]:
        link, reason = choice.connect(self.address(**changed), self.assign, 4)
        try:
            yield link, reason
        finally:
            link.close()

    def receive(self, link: Link) -> Received:
        deadline = time.monotonic() + PATIENCE_S
        while (received := link.receive()) is None:
            assert time.monotonic() < deadline, "nothing came"
            self.waiting.wait(50 if link.flush() else 2)
        return received

    def abort(self, link: Link) -> None:
        """The shortest exchange."""
        link.send(m.AbortStep(LIFE, 1, 1, 0), [])
        assert isinstance(self.receive(link)[0], m.StepAborted)


@contextmanager
def _running(model: SlicedModel, folder: Path, link_options: SocketOptions | None = None) -> Iterator[Rig]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    gateway, endpoint = bind(context, zmq.ROUTER, f"ipc://{folder}/gateway")
    core = AttentionCore(torch.device("cpu"))
    core.assign(m.AttentionAssign(LIFE, 0, 0, _geometry(model), _heads(model), 8, 16, Dtype.FLOAT32, Dtype.FLOAT32))
    worker = AttentionWorker(context, "a0", core, "tcp://127.0.0.1:0", SocketOptions(), 0, link_options)
    worker.join(m.Welcome(LIFE, endpoint, 1.0))
    stop = StopSignal()
    thread = threading.Thread(target=worker.loop, args=(stop,))
    thread.start()
    try:
        yield Rig(worker, model, context)
    finally:
        stop.set()
        thread.join(10)
        stop.close()
        worker.close()
        close_bound(gateway, endpoint)
        context.term()
    assert not thread.is_alive()


@pytest.fixture
def rig(sliced: SlicedModel, tmp_path: Path) -> Iterator[Rig]:
    with _running(sliced, tmp_path) as rig:
        yield rig


@pytest.mark.parametrize(
    ("wanted", "flows", "changed", "kind"),
    [
        ("auto", 1, {}, BEST),
        ("auto", 1, {"door": "shm://another-boot/pannier-x"}, "tcp"),
        ("auto", 3, {"door": ""}, "tcp x3"),
        ("auto", 1, {"door": "", "tcp": ""}, "zmq tcp"),
        ("tcp", 1, {}, "tcp"),
        ("tcp", 2, {}, "tcp x2"),
        ("zmq", 1, {}, "zmq tcp"),
        ("zmq", 2, {}, "zmq tcp x2"),
    ],
)
def test_the_fastest_that_both_ends_allow(
    rig: Rig, wanted: str, flows: int, changed: dict[str, str], kind: str
) -> None:
    """Shared memory within a host, else plain TCP, else ZeroMQ; and each of them works."""
    with rig.link(rig.choice(wanted, flows), **changed) as (link, _):
        assert link.kind == kind
        rig.abort(link)


def test_encrypted_links_go_over_zeromq(sliced: SlicedModel, tmp_path: Path) -> None:
    """And whoever wants nothing but plain TCP is told."""
    make_keys(tmp_path)
    _, keys = worker_keys(tmp_path)
    encrypted = SocketOptions(curve=keys)
    with _running(sliced, tmp_path, encrypted) as rig:
        with rig.link(rig.choice(options=encrypted), door="") as (link, reason):
            assert link.kind == "zmq tcp"
            assert "offers no plain TCP" in reason
        with pytest.raises(CannotTalk, match="a0 offers no plain TCP"):
            rig.choice("tcp", options=encrypted).connect(rig.address(), rig.assign, 4)


def test_pieces_take_turns_over_several_connections(rig: Rig) -> None:
    """Answers come on any of them, and none is lost."""
    with rig.link(rig.choice("tcp", 3)) as (link, _):
        frame = (LIFE, 1, 1, 0)
        link.send(m.BeginStep(*frame, (), (), ()), [torch.zeros(0, dtype=torch.int32)])
        for number in range(9):
            # Larger than its step allows: each is answered by a failure, or dropped since the step has failed.
            link.send(m.Piece(*frame, 0, number, False, 0, ()), [torch.zeros(1, 3, 8)] * 2)
        link.send(m.EndStep(*frame, 9), [])
        kinds = {type(rig.receive(link)[0])}
        assert kinds == {m.StepFailed}
        rig.abort(link)


def test_an_attention_worker_that_has_gone_is_noticed_and_what_is_sent_then_is_dropped(
    sliced: SlicedModel, tmp_path: Path
) -> None:
    with _running(sliced, tmp_path) as rig:
        link, _ = rig.choice("tcp").connect(rig.address(), rig.assign, 4)
        rig.abort(link)
    deadline = time.monotonic() + PATIENCE_S
    while rig.waiting._streams is not None:
        assert time.monotonic() < deadline
        rig.waiting.wait(50)
        assert link.receive() is None
    link.send(m.AbortStep(LIFE, 1, 2, 0), [])
    assert link.flush()
    assert link.receive() is None
    link.close()


def test_messages_are_as_large_as_what_was_assigned_allows(sliced: SlicedModel) -> None:
    """No frame of a legal step is larger than was said when the link was made."""
    assign = m.ComputeAssign(LIFE, 1, (), max_batch_tokens=100, block_size=16)
    sizes = link_sizes(assign, _heads(sliced), sliced.calls, itemsize=4, window=256)
    call = sliced.calls[0]
    q, k, v = (
        100 * n * 4 for n in (call.q_heads * call.k_size, call.kv_heads * call.k_size, call.kv_heads * call.v_size)
    )
    assert sizes.request > q + k + v
    assert sizes.answer > 100 * call.q_heads * (call.v_size + 1) * 4
    assert sizes.begin > 100 * (4 * 16 + 50)
    assert sizes.largest == (max(sizes[:3]), sizes.answer)
    assert LinkSizes(1, 2, 3, 4).largest == (3, 4)
