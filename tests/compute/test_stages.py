"""A model's stages in several cores: together they draw what the whole draws, and nothing strange disturbs them."""

from collections import deque
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
import zmq
from transformers import LlamaForCausalLM

from pannier.compute.core import MAX_GIVEN, ComputeCore
from pannier.compute.link import InProcessLink, Tensors
from pannier.compute.stage_link import StageLink
from pannier.net import SocketOptions
from pannier.slicer import SlicedModel, Stage, slice_model
from pannier.wire import StageToStage, WireError, WorkerToGatewayData
from pannier.wire import messages as m

from .conftest import _build
from .rig import BLOCK_SIZE, LIFE, MadeStep, Stack, Text, accept, assert_drawn, texts

pytestmark = pytest.mark.timeout(60)


class Ring:
    """Two stages of one lane over one attention worker; what they pass on waits until it is handed over."""

    def __init__(self, models: list[SlicedModel], calls: Stack) -> None:
        self.replies: list[WorkerToGatewayData] = []
        self.passed: list[deque[tuple[StageToStage, Tensors]]] = [deque(), deque()]
        (self.attention,) = calls.attention.values()
        self.cores = [self._core(number, model) for number, model in enumerate(models)]

    def _core(self, number: int, model: SlicedModel) -> ComputeCore:
        name = f"c{number}"

        def pass_on(message: StageToStage, tensors: Tensors) -> None:
            self.passed[number].append((message, tensors))

        core = ComputeCore(
            model,
            1,
            lambda address: InProcessLink(name, address.name, self.attention),
            self.replies.append,
            stage=Stage(number, 2),
            pass_on=pass_on,
        )
        heads = (m.HeadRange(0, 3),) * 2
        group = m.GroupAddress(0, (m.ShardAddress("a0.0", "", heads),))
        core.obey(m.ComputeAssign(LIFE, 1, (group,), 512, BLOCK_SIZE), [])
        self.replies.clear()
        return core

    def send(self, step: MadeStep) -> None:
        for core in self.cores:
            core.obey(step.message, step.tensors)

    def pump(self) -> None:
        """Each stage goes on as far as it can, without what the other has passed on."""
        for core in self.cores:
            can_go_on = True
            while can_go_on:
                can_go_on = core.advance()
                for link in core.links.values():
                    while (received := link.receive()) is not None:
                        core.receive(link, *received)
                        can_go_on = True

    def hand_over(self, number: int) -> StageToStage:
        """What a stage has passed on first arrives at the other."""
        message, tensors = self.passed[number].popleft()
        self.cores[1 - number].receive_from_stage(message, tensors)
        self.pump()
        return message

    def said(self) -> list[WorkerToGatewayData]:
        taken, self.replies[:] = list(self.replies), []
        return taken


@pytest.fixture
def plan(sliced: SlicedModel) -> Stack:
    """What plans the steps, whose own core is idle."""
    return Stack(sliced, lanes=1)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[SlicedModel]:
    """The two stages."""
    folder = tmp_path_factory.mktemp("stages")
    with torch.inference_mode(mode=False):
        return [slice_model(_build(), stage=Stage(number, 2), cache_dir=folder) for number in range(2)]


@pytest.fixture
def ring(models: list[SlicedModel], plan: Stack) -> Ring:
    return Ring(models, plan)


def test_stages_draw_what_the_whole_draws(ring: Ring, plan: Stack, whole: LlamaForCausalLM) -> None:
    """A prompt in chunks, then tokens one by one, each planned before the one before it was drawn."""
    (text,) = texts([9])
    chunk = plan.step().chunk(text, 4).made()
    last = plan.step().last_chunk(text).made()
    decode = plan.step().decode_previous(text, last, 0).made()
    for step in (chunk, last, decode):
        ring.send(step)
    ring.pump()
    assert [type(each) for each in ring.said()] == [m.StageDone, m.StageDone], "the first stage runs ahead"
    ring.hand_over(0)
    ring.hand_over(0)
    done = [each for each in ring.said() if isinstance(each, m.StepDone)]
    assert [each.step for each in done] == [chunk.message.step, last.message.step]
    assert_drawn(whole, text.tokens, done[1].drawn[0])
    accept(text, done[1].drawn[0])
    assert isinstance(ring.hand_over(1), m.DrawnTokens)
    assert [type(each) for each in ring.said()] == [m.StageDone]
    ring.hand_over(0)
    (decoded,) = [each for each in ring.said() if isinstance(each, m.StepDone)]
    assert_drawn(whole, text.tokens, decoded.drawn[0])


def test_a_stage_copies_the_blocks_of_its_own_calls(ring: Ring, plan: Stack, whole: LlamaForCausalLM) -> None:
    """What the first stage has written into the copy must not be overwritten when the second begins."""
    (text,) = texts([6])
    ring.send(plan.step().last_chunk(text).made())
    ring.pump()
    ring.hand_over(0)
    (first,) = [each.drawn[0] for each in ring.said() if isinstance(each, m.StepDone)]
    accept(text, first)
    target = text.blocks[-1]  # far behind all that is stored
    fork = Text(1, list(text.tokens), [text.blocks[0], target, *text.blocks[2:]], stored=text.stored)
    step = plan.step().decode(fork).made()
    copies = (m.BlockCopy(0, text.blocks[1], target),)
    copying = MadeStep(msgspec.structs.replace(step.message, copies=copies), step.tensors)
    ring.send(copying)
    ring.pump()
    ring.hand_over(1)
    ring.hand_over(0)
    (decoded,) = [each for each in ring.said() if isinstance(each, m.StepDone)]
    assert_drawn(whole, fork.tokens, decoded.drawn[0])


def test_what_comes_from_a_former_session_is_dropped_and_counted(ring: Ring, plan: Stack) -> None:
    (text,) = texts([3])
    ring.send(plan.step().last_chunk(text).made())
    ring.pump()
    last = ring.cores[1]
    last.obey(m.NewSession(LIFE, 2), [])
    ring.hand_over(0)
    assert last.counters["stale_frames"] == 1
    assert not last.advance()


def test_more_activations_than_steps_can_be_planned_are_refused(ring: Ring) -> None:
    """Memory for what is early is bounded."""
    last = ring.cores[1]
    for number in range(MAX_GIVEN):
        last.receive_from_stage(m.Activations(LIFE, 1, number, 0, (), ()), [])
    with pytest.raises(WireError, match="is too much"):
        last.receive_from_stage(m.Activations(LIFE, 1, 9, 0, (), ()), [])


def test_values_of_another_number_than_the_stage_takes_fail_the_step(ring: Ring, plan: Stack) -> None:
    (text,) = texts([3])
    step = plan.step().last_chunk(text).made()
    ring.send(step)
    ring.cores[1].receive_from_stage(m.Activations(LIFE, 1, step.message.step, 0, (), ()), [])
    ring.pump()
    (failed,) = [each for each in ring.said() if isinstance(each, m.StepFailed)]
    assert "0 values with 0 tensors came" in failed.reason


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[tuple[StageLink, StageLink]]:
    """Two ends that reach each other."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    one, other = (StageLink(context, f"ipc://{tmp_path}/{name}", SocketOptions()) for name in "ab")
    yield one, other
    one.close()
    other.close()
    context.term()
    assert not list(tmp_path.iterdir()), "a socket file is left"


def test_values_arrive_as_they_were_and_what_is_no_message_is_refused(ends: tuple[StageLink, StageLink]) -> None:
    """Before any is sent nobody is dialled; afterwards the other goes on to be heard."""
    one, other = ends
    assert other.receive() is None
    assert one.flush()
    one.dial(m.StageAddress("b", other.endpoint))
    sent = [torch.randn(3, 5, dtype=torch.bfloat16), torch.arange(4)]
    message = m.Activations(LIFE, 1, 2, 0, (None, 7, None), ())
    one.send(message, sent)
    assert other.socket.poll(10_000)
    received = other.receive()
    assert received is not None
    got, tensors = received
    assert isinstance(got, m.Activations)
    assert got.sizes == message.sizes
    assert all(torch.equal(*pair) for pair in zip(tensors, sent, strict=True))
    assert one._next is not None
    one._next.send_multipart([b"nonsense"])
    assert other.socket.poll(10_000)
    with pytest.raises(WireError):
        other.receive()
