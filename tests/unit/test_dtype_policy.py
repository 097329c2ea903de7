"""Which element type is used for what, and that its reason is said."""

from math import inf

import pytest

from pannier.runtime.dtype_policy import (
    Range,
    choose_compute,
    choose_kv,
    choose_storage,
    choose_wire,
    in_range,
    out_of_range,
)
from pannier.wire import Dtype

F32, BF16, F16 = Dtype.FLOAT32, Dtype.BFLOAT16, Dtype.FLOAT16
AMPERE, TURING, OLD_CPU = (F32, BF16, F16), (F32, F16), (F32,)


@pytest.mark.parametrize(
    ("stored", "native", "chosen", "because"),
    [
        (BF16, AMPERE, BF16, "as the weights are stored"),
        (F16, AMPERE, F16, "as the weights are stored"),
        (F32, AMPERE, BF16, "native"),
        (None, AMPERE, BF16, "native"),
        (BF16, TURING, F16, "would have to convert bfloat16"),
        (BF16, OLD_CPU, F32, "no narrower type"),
        (F16, (F32, BF16), BF16, "native"),
    ],
)
def test_the_narrow_type_that_the_device_multiplies(
    stored: Dtype | None, native: tuple[Dtype, ...], chosen: Dtype, because: str
) -> None:
    found = choose_compute(None, stored, native, {})
    assert found.dtype is chosen
    assert because in found.reason


def test_what_is_asked_for_wins_and_emulation_is_said() -> None:
    assert choose_compute(F32, BF16, AMPERE, {}).reason == "asked for"
    assert choose_compute(BF16, BF16, TURING, {}).reason == "asked for, though the device has to convert it"


def test_a_type_that_is_slower_than_float32_is_not_native_whatever_the_processor_says() -> None:
    found = choose_compute(None, BF16, (F32, BF16), {F32: 1.0, BF16: 2.0})
    assert (found.dtype, found.reason) == (F32, "bfloat16 took longer in a product of this model's shape")
    assert choose_compute(None, BF16, AMPERE, {F32: 1.0, BF16: 2.0, F16: 0.5}).dtype is F16
    assert choose_compute(None, BF16, (F32, BF16), {F32: 1.0, BF16: 1.1}).dtype is BF16  # no more than noise
    assert "2.0x as fast" in choose_compute(None, BF16, (F32, BF16), {F32: 1.0, BF16: 0.5}).reason


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (Range(1.5, 300.0), None),
        (Range(65504.0, 65504.0), None),
        (Range(inf, 1.0), "a weight is too large for float16, which ends at 65504"),
        (Range(1e5, 1.0), "a weight of 1e+05 is too large for float16, which ends at 65504"),
        (Range(1.0, inf), "a activation on a sample is too large for float16, which ends at 65504"),
    ],
)
def test_halves_end_at_65504(found: Range, reason: str | None) -> None:
    said = out_of_range(found)
    assert said == (reason and reason.replace("a activation", "an activation"))


def test_what_fits_is_said_with_its_largest_numbers() -> None:
    assert in_range(Range(1.36, 57.4)) == "largest weight 1.36, largest activation on a sample 57.4, of 65504"
    assert in_range(Range(1.36, 0.0)) == "largest weight 1.36, of 65504"


def test_weights_are_held_as_they_are_multiplied() -> None:
    compute = choose_compute(None, F32, AMPERE, {})
    assert choose_storage(compute, F32).dtype is compute.dtype
    assert "converted once" in choose_storage(compute, F32).reason
    assert choose_storage(compute, BF16).reason == "as it is computed"


def test_blocks_and_links_say_why() -> None:
    kv = choose_kv(BF16, None, TURING)
    assert (kv.dtype, kv.reason) == (F16, "an attention worker would have to convert bfloat16")
    assert "the compute worker converts" in choose_wire(BF16, kv.dtype, TURING).reason
    assert choose_wire(BF16, BF16, AMPERE).reason == "what is computed and stored"
    assert choose_kv(BF16, F32, AMPERE).reason == "asked for"
    assert choose_wire(BF16, F32, AMPERE).dtype is BF16
