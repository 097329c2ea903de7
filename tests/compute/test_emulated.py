"""An emulated device takes its time, and takes it from nobody else."""

import itertools
import select
import time

import pytest

from pannier.compute.core import ComputeCore
from pannier.compute.emulated_device import EmulatedDevice, EmulatedModel, StepTime
from pannier.compute.step_clock import Span
from pannier.runtime.alarm import Alarm
from pannier.slicer import SlicedModel
from pannier.wire import messages as m

from .rig import Stack, texts


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
