"""Emulated links and devices: they take their time, and take it from nobody else."""

import itertools
import select
import time

import pytest
import torch

from pannier.compute.core import ComputeCore
from pannier.compute.emulated_device import EmulatedDevice, EmulatedModel, StepTime
from pannier.compute.emulated_link import EmulatedLink
from pannier.compute.link import Link
from pannier.compute.step_clock import Span
from pannier.runtime.alarm import Alarm
from pannier.slicer import SlicedModel
from pannier.wire import messages as m

from .rig import HeldLink, Stack, texts

DELAY_S = 0.03


class EmulatedStack(Stack):
    """A stack whose compute device is emulated."""

    def __init__(self, model: SlicedModel, step_ms: float) -> None:
        self.device = EmulatedDevice(StepTime(step_ms), len(model.calls) + 1)
        self.spans: list[Span] = []
        super().__init__(EmulatedModel(model))

    def make_core(self, model: SlicedModel, lanes: int) -> ComputeCore:
        return ComputeCore(
            model, lanes, self.connect, self.replies.append, device=self.device, record=self.spans.append
        )

    def pump_until_done(self, count: int) -> list[m.StepDone]:
        """Go on as the step thread does, which sleeps until something is due."""
        while len(self.replies) < count:
            self.pump()
            if self.core.due is not None:
                time.sleep(max(0.0, self.core.due - time.perf_counter()))
        return self.take(m.StepDone, count)


def test_a_message_takes_its_delay_each_way_and_blocks_nobody(sliced: SlicedModel) -> None:
    """Sending returns at once; nothing arrives before its time, and all of it in order."""
    inner: list[HeldLink] = []

    def slow(link: Link) -> Link:
        inner.append(HeldLink(link))
        inner[0].held = False
        return EmulatedLink(inner[0], DELAY_S * 1e3)

    stack = Stack(sliced, wrap=slow)
    (link,) = stack.core.links.values()
    assert isinstance(link, EmulatedLink)
    started = time.perf_counter()
    for lane, text in enumerate(texts([6, 5])):
        stack.send(stack.step(lane).last_chunk(text).made())
    stack.core.advance()  # both lanes compute, though what they sent has not left
    left_at = time.perf_counter()
    assert not inner[0].sent or left_at - started > DELAY_S
    while len(stack.replies) < 2:
        assert link.due is not None or inner[0].sent
        stack.pump()
    assert [type(message) for message in inner[0].sent if message.lane == 0] == [
        m.BeginStep, m.Piece, m.Piece, m.EndStep,
    ]  # fmt: skip
    for done in stack.take(m.StepDone, 2):
        assert done.times.total_s >= 2 * DELAY_S  # the last message there, and its acknowledgement back
    assert time.perf_counter() - started >= 2 * DELAY_S


def test_a_rate_holds_what_is_larger_for_longer(sliced: SlicedModel) -> None:
    """And the next message leaves behind the one before it."""
    held = HeldLink(Stack(sliced).core.links["a0.0"])
    link = EmulatedLink(held, gigabits=1e-3)  # 125 bytes a millisecond
    started = time.perf_counter()
    for size in (1250, 2500):
        link.send(m.EndStep(1, 1, 1, 0, 0), [torch.zeros(size, dtype=torch.uint8)])
    assert link.due is not None
    assert link.due - started == pytest.approx(0.010, abs=0.005)
    while len(held.sent) < 2:
        link.flush()
    assert time.perf_counter() - started >= 0.030
    assert link.due is None


def test_lanes_take_turns_on_an_emulated_device(sliced: SlicedModel) -> None:
    """One slice at a time, each as long as it should be; while one lane is on the device the other waits its turn."""
    stack = EmulatedStack(sliced, step_ms=30.0)
    for lane, text in enumerate(texts([6, 5])):
        stack.send(stack.step(lane).last_chunk(text).made())
    stack.pump_until_done(2)
    slices = sorted((span.start, span.end, span.lane) for span in stack.spans if span.kind == "compute")
    assert len(slices) == 2 * (len(sliced.calls) + 1)
    assert all(end - start == pytest.approx(0.010) for start, end, _ in slices)
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(slices))
    assert [lane for _, _, lane in slices[:2]] == [0, 1]


def test_a_device_at_work_is_not_idle(sliced: SlicedModel) -> None:
    """Only what lies behind its last slice is."""
    stack = EmulatedStack(sliced, step_ms=30.0)
    start, end = stack.device.launch(1)
    stack.core.idled(start, end)
    assert stack.core.idle_s == 0
    stack.core.idled(start, end + 1)
    assert stack.core.idle_s == pytest.approx(1)


def test_an_alarm_wakes_a_poller_once_its_moment_has_come() -> None:
    """Neither before nor, once it was put off or taken back, at all."""
    alarm = Alarm()
    try:
        moment = time.perf_counter() + 0.02
        alarm.set(moment)
        assert select.select([alarm], [], [], 30) == ([alarm], [], [])
        assert time.perf_counter() >= moment
        alarm.set(time.perf_counter() + 60)
        assert select.select([alarm], [], [], 0) == ([], [], [])
        alarm.set(time.perf_counter() - 1)
        assert select.select([alarm], [], [], 30) == ([alarm], [], [])
        alarm.set(None)
        assert select.select([alarm], [], [], 0) == ([], [], [])
    finally:
        alarm.close()
