"""The dispatch mode sees what is hidden from a count of `.to()`."""

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pannier.audit.calls import Call, Origin
from pannier.audit.rules import How, conversions_of
from pannier.audit.watch import Watch

BF16, FP32 = torch.bfloat16, torch.float32
Found = Counter[tuple[str, torch.dtype, torch.dtype, str, str]]


def _watched(model: nn.Module, forward: Callable[[], object]) -> list[Call]:
    watch = Watch(model)
    with watch.watching():
        forward()
    return watch.take()


def _found(calls: list[Call]) -> Found:
    return Counter(
        (call.path, each.source.dtype, each.target, str(each.how), str(each.source.origin))
        for call in calls
        for each in conversions_of(call)
    )


class Block(nn.Module):
    """Casts in two modules, of an activation and of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8, bias=False, dtype=BF16) for _ in range(3)])
        self.scale = nn.Parameter(torch.ones(8, 8, dtype=FP32), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float() @ self.scale + x  # the cast, a product, and a promotion


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference_mode_hides_nothing(mode: Callable[[], torch.no_grad]) -> None:
    """The same conversions as without it, in which operators arrive whole."""
    model, x = Block(), torch.ones(2, 8, dtype=BF16)
    with mode():
        found = _found(_watched(model, lambda: model(x)))
    assert found == Counter({
        ("(model)", BF16, FP32, "explicit", "activation"): 1,
        ("(model)", BF16, FP32, "promotion", "activation"): 1,
    })  # fmt: skip


def test_autocast_is_seen_weights_apart_from_activations() -> None:
    """With frozen fp32 weights each one is cast in every pass, and so is what meets it."""
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)).requires_grad_(False)

    def forward() -> None:
        with torch.no_grad(), torch.autocast("cpu", BF16):
            model(torch.ones(2, 8))

    found = _found(_watched(model, forward))
    assert found["*", FP32, BF16, "explicit", "weight"] == 2
    assert found["*", FP32, BF16, "explicit", "activation"] == 1


def test_weights_that_are_computed_in_every_pass_are_weights() -> None:
    """As when a quantised weight is widened and scaled for each product."""

    class Quantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("packed", torch.ones(8, 8, dtype=torch.int8))
            self.register_buffer("scale", torch.ones(8, 1, dtype=BF16))

        def forward(self, x: Tensor) -> Tensor:
            assert isinstance(self.packed, Tensor)
            assert isinstance(self.scale, Tensor)
            return x @ (self.packed.to(BF16) * self.scale).float().T

    model = Quantised()
    with torch.no_grad():
        found = _found(_watched(model, lambda: model(torch.ones(2, 8))))
    assert found == Counter({
        ("(model)", torch.int8, BF16, "explicit", "weight"): 1,
        ("(model)", BF16, FP32, "explicit", "weight"): 1,
    })  # fmt: skip


def test_a_cache_is_known_from_the_second_step_on() -> None:
    model = nn.Identity()
    watch, cache = Watch(model), {"layers": [torch.ones(1, 2, 30, 8)]}
    watch.keep(cache)
    with watch.watching():
        grown = torch.cat([cache["layers"][0], torch.ones(1, 2, 1, 8)], 2)
        grown.transpose(1, 2).to(BF16)
    (cast,) = [each for call in watch.take() for each in conversions_of(call)]
    assert (cast.source.origin, cast.how) == (Origin.CACHE, How.EXPLICIT)


def test_a_model_is_left_as_it_was() -> None:
    model = Block()
    _watched(model, lambda: model(torch.ones(2, 8, dtype=BF16)))
    hooks = [h for module in model.modules() for h in (module._forward_hooks, module._forward_pre_hooks)]
    assert not any(hooks)
