"""Guarded tensors can be used, and not converted."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pannier.runtime.strict import Converted, Guard

WEIGHT = torch.ones(8, 16, dtype=torch.bfloat16)
NORM = torch.ones(16, dtype=torch.bfloat16)
ROW = torch.ones(1, 16, dtype=torch.bfloat16)


def _guarded(use: Callable[[], Tensor]) -> Tensor:
    with torch.inference_mode(), Guard("a weight", [WEIGHT, NORM]):
        return use()


@pytest.mark.parametrize(
    "use",
    [
        lambda: torch.nn.functional.linear(ROW, WEIGHT),
        lambda: ROW @ WEIGHT.T,
        lambda: ROW.float() * NORM.float(),
        lambda: WEIGHT.new_zeros(3, dtype=torch.float32),
        lambda: WEIGHT[0].to(torch.float32),
        lambda: torch.nn.functional.embedding(torch.tensor([1, 2]), WEIGHT).float(),
        lambda: WEIGHT.to(torch.bfloat16),
    ],
    ids=["linear", "transposed", "norm", "new", "vector-of-it", "looked-up", "no-op"],
)
def test_what_computes_with_them_runs(use: Callable[[], Tensor]) -> None:
    """So do casts of activations, and of vectors, which are no larger."""
    assert _guarded(use).numel()


@pytest.mark.parametrize(
    "use",
    [
        lambda: WEIGHT.to(torch.float32),
        lambda: WEIGHT.T.to(torch.float16),
        lambda: WEIGHT * torch.ones(8, 16),
        lambda: torch.empty(8, 16).copy_(WEIGHT),
        lambda: torch.softmax(WEIGHT, -1, dtype=torch.float32),
    ],
    ids=["cast", "cast-of-a-view", "promotion", "copy", "inside-an-operator"],
)
def test_what_converts_them_is_an_error(use: Callable[[], Tensor]) -> None:
    with pytest.raises(Converted, match=r"dtype_strict: \w+ converts a weight \[\d+, \d+\] from bfloat16 to float"):
        _guarded(use)


def test_packed_weights_are_guarded_too() -> None:
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this processor packs none")
    packed = torch.ops.mkldnn._reorder_linear_weight(WEIGHT)
    with torch.inference_mode(), Guard("a weight", [packed]):
        torch.ops.mkldnn._linear_pointwise(ROW, packed, None, "none", [], "")
        with pytest.raises(Converted):
            packed.to_dense(torch.float32)


def test_what_is_small_beside_the_rest_may_be_converted() -> None:
    """As the weights of a router are, which is computed in float32 on purpose."""
    router, experts = torch.ones(4, 8, dtype=torch.bfloat16), torch.ones(512, 128, dtype=torch.bfloat16)
    with Guard("a weight", [router, experts]):
        router.float()
        with pytest.raises(Converted):
            experts.float()
