"""Which conversions a call makes."""

import pytest
import torch

from pannier.audit.calls import Call, Origin, Value, fold, origin_of
from pannier.audit.rules import How, conversions_of, emulated_in

BF16, FP16, FP32, I64 = torch.bfloat16, torch.float16, torch.float32, torch.int64


def _call(op: str, inputs: list[tuple[torch.dtype, tuple[int, ...]]], output: torch.dtype, **kind: bool) -> Call:
    values = tuple(Value(dtype, shape) for dtype, shape in inputs)
    return Call("layers.*", op, values, Value(output, inputs[0][1]), **kind)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (_call("_to_copy", [(BF16, (2, 3))], FP32), [(BF16, FP32, How.EXPLICIT)]),
        (_call("_to_copy", [(I64, (3,))], FP32), [(I64, FP32, How.EXPLICIT)]),
        (_call("copy_", [(BF16, (2, 3)), (FP32, (2, 3))], BF16), [(FP32, BF16, How.EXPLICIT)]),
        (_call("add", [(BF16, (2, 3)), (FP32, (2, 3))], FP32, pointwise=True), [(BF16, FP32, How.PROMOTION)]),
        (_call("mul_", [(BF16, (2, 3)), (FP32, (2, 3))], BF16, pointwise=True), [(FP32, BF16, How.PROMOTION)]),
        (_call("cat", [(BF16, (2, 3)), (FP32, (2, 3))], FP32), [(BF16, FP32, How.PROMOTION)]),
        (_call("mul", [(I64, (3,)), (FP32, (3,))], FP32, pointwise=True), [(I64, FP32, How.PROMOTION)]),
        (_call("_softmax", [(BF16, (2, 3))], FP32), [(BF16, FP32, How.OPERATOR)]),
    ],
    ids=["cast", "positions", "copy", "sum", "in-place", "concatenation", "positions-in-a-product", "softmax"],
)
def test_conversions_are_found(call: Call, expected: list[tuple[torch.dtype, torch.dtype, How]]) -> None:
    assert [(each.source.dtype, each.target, each.how) for each in conversions_of(call)] == expected


@pytest.mark.parametrize(
    "call",
    [
        _call("_to_copy", [(BF16, (2, 3))], BF16),
        _call("_to_copy", [(FP32, ())], BF16),
        _call("_to_copy", [(I64, (3,))], torch.int32),
        _call("mul", [(BF16, (2, 3)), (FP32, ())], BF16, pointwise=True),
        _call("embedding", [(BF16, (9, 3)), (I64, (2,))], BF16),
        _call("where", [(torch.bool, (2, 3)), (BF16, (2, 3))], BF16, pointwise=True),
        _call("new_zeros", [(BF16, (2, 3))], FP32),
        _call("view", [(BF16, (2, 4))], torch.int32),
        _call("gt", [(BF16, (2, 3))], torch.bool, pointwise=True),
    ],
    ids=["no-op", "a-number", "indices", "number-beside", "lookup", "mask", "new", "reinterpreted", "comparison"],
)
def test_what_converts_nothing_is_not_reported(call: Call) -> None:
    assert conversions_of(call) == []


def test_bytes_are_what_is_read_and_written() -> None:
    (found,) = conversions_of(_call("_to_copy", [(BF16, (10, 10))], FP32))
    assert found.nbytes == 100 * (2 + 4)


def test_products_of_types_that_the_device_lacks_are_emulated() -> None:
    """By their largest operand; where the type is native, and where nothing is multiplied, nothing is emulated."""
    product = _call("mm", [(BF16, (1, 64)), (BF16, (64, 64))], BF16)
    found = emulated_in(product, frozenset({FP32, FP16}))
    assert found is not None
    assert (found.source.shape, found.target, found.how) == ((64, 64), FP32, How.EMULATED)
    assert emulated_in(product, frozenset({FP32, BF16})) is None
    assert emulated_in(_call("add", [(BF16, (64, 64))], BF16), frozenset({FP32})) is None


def test_origins_follow_the_numbers() -> None:
    """What comes from weights alone is a weight; a cache stays one when it grows, and is none as scores."""
    weight, cache, row = (Value(BF16, (64, 64), origin) for origin in Origin)
    assert origin_of("mul", [weight, weight], 4096) is Origin.WEIGHT
    assert origin_of("mul", [weight, row], 4096) is Origin.OTHER
    assert origin_of("cat", [cache, row], 8192) is Origin.CACHE
    assert origin_of("select", [cache], 64) is Origin.OTHER
    assert origin_of("bmm", [row, cache], 4096) is Origin.OTHER
    assert origin_of("index", [weight, row], 64) is Origin.WEIGHT
    assert origin_of("embedding", [weight, row], 64) is Origin.OTHER


@pytest.mark.parametrize(
    ("path", "folded"),
    [
        ("model.layers.11.mlp", "model.layers.*.mlp"),
        ("h.0", "h.*"),
        ("experts.3.w1", "experts.*.w1"),
        ("", "(model)"),
    ],
)
def test_layers_are_folded(path: str, folded: str) -> None:
    assert fold(path) == folded
