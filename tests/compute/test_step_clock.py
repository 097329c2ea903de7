"""Where the time of a lane-step goes."""

import time

import pytest

from pannier.compute.step_clock import Span, StepClock
from pannier.slicer import SlicedModel
from pannier.wire import messages as m

from .rig import HeldLink, Stack, texts


def test_a_wait_is_attention_in_the_middle_of_transfer() -> None:
    """Idle time counts for what the lane waited for then; what another lane hid is not exposed."""
    spans: list[Span] = []
    clock = StepClock(1, 7, 0.0, spans.append)
    clock.computed(0.0, 2.0)
    clock.idled(2.0, 3.0)
    clock.idled(5.0, 6.5)
    clock.waited(8.0, attention_s=2.0)
    clock.computed(8.0, 9.0)
    times = clock.times(10.0)
    assert (times.compute_s, times.attention_s, times.transfer_s, times.total_s) == (3.0, 2.0, 4.0, 10.0)
    assert (times.exposed_attention_s, times.exposed_transfer_s) == (1.0, 1.5)
    assert [(span.kind, span.call, span.start, span.end) for span in spans] == [
        ("compute", 0, 0.0, 2.0),
        ("transfer", 0, 2.0, 4.0),
        ("attention", 0, 4.0, 6.0),
        ("transfer", 0, 6.0, 8.0),
        ("compute", 1, 8.0, 9.0),
    ]
    assert {(span.lane, span.step) for span in spans} == {(1, 7)}


def test_attention_that_the_lane_did_not_wait_for_is_hidden() -> None:
    """It was done before the lane had done what was its own; nothing of the wait is left for transfer."""
    clock = StepClock(0, 1, 0.0)
    clock.computed(0.0, 4.0)
    clock.waited(4.5, attention_s=2.0)
    times = clock.times(5.0)
    assert (times.attention_s, times.transfer_s, times.exposed_transfer_s) == (2.0, 0.0, 0.0)


@pytest.mark.parametrize("is_held", [True, False])
def test_the_times_of_a_step_add_up(sliced: SlicedModel, is_held: bool) -> None:
    """One lane alone computes, waits for attention or for the rest; and the worker knows the sums of all steps."""
    stack = Stack(sliced, wrap=HeldLink if is_held else lambda link: link)
    (text,) = texts([9])
    all_times = []
    for plan in (stack.step().last_chunk(text), stack.step()):
        stack.send((plan if plan.ids else plan.decode(text)).made())
        stack.pump()
        if is_held:
            idle_for(stack, 0.02)
            stack.link().let_through()
            stack.pump()
            while not stack.replies:
                stack.link().let_through()
                stack.pump()
        (done,) = stack.take(m.StepDone)
        text.tokens.append(done.drawn[0].token)
        all_times.append(done.times)
        times = done.times
        assert 0 < times.compute_s + times.attention_s + times.transfer_s < times.total_s + 0.001
        assert times.exposed_attention_s + times.exposed_transfer_s == pytest.approx(0.02 if is_held else 0, rel=0.5)
    assert all_times[1].attention_s > 0
    assert stack.core.step_seconds["total_s"] == pytest.approx(sum(times.total_s for times in all_times))


def idle_for(stack: Stack, seconds: float) -> None:
    """As the step thread says it when no lane could go on."""
    now = time.perf_counter()
    time.sleep(seconds)
    stack.core.idled(now, now + seconds)
