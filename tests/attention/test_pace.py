"""An emulated attention device takes longer, and answers the same."""

import time

import pytest

from pannier.attention.pace import Pace, PacedDevice
from pannier.runtime.config import AttentionConfig, load


def test_a_call_takes_as_long_as_a_slower_device() -> None:
    """What it really took is part of that."""
    assert Pace(rate=0.25).seconds(0.01, rows=1, calls=2) == pytest.approx(0.04)
    started = time.perf_counter()
    assert Pace(rate=0.25).wait(0.01, 1, 2) == pytest.approx(0.04)
    assert time.perf_counter() - started >= 0.03


def test_a_step_is_shared_by_its_calls() -> None:
    """And a call that takes longer anyway isn't held."""
    pace = Pace(step_ms=20, row_us=500)
    assert pace.seconds(0.001, rows=8, calls=4) == pytest.approx((0.020 + 8 * 0.0005) / 4)
    assert pace.seconds(5.0, rows=8, calls=4) == 5.0


def test_a_paced_device_does_one_call_after_the_other() -> None:
    """And the thread that launches them waits for none."""
    device = PacedDevice(Pace(step_ms=60_000))
    started = time.perf_counter()
    assert [device.launch(0.0, 1, 2) for _ in range(3)] == [30.0] * 3
    assert started + 90 <= device.busy_until <= time.perf_counter() + 90


def test_what_is_configured() -> None:
    assert Pace.of(load(AttentionConfig, environ={})) is None
    given = {"emulate_rate": "0.5", "emulate_attention": "8,2"}
    assert Pace.of(load(AttentionConfig, flags=given, environ={})) == Pace(0.5, 8.0, 2.0)
