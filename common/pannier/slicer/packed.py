"""Weights of linear layers in the layout that a CPU's bfloat16 units want, rearranged once instead of in every call.

For the few rows of a decode step rearranging a weight takes as long as the product: packed, a linear layer of a small
model takes 0.6 to 0.9 of the time. A weight that is used in another way too (tied to the embedding) stays as it is
there.
"""

import ast
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch.nn.functional import linear as plain_linear

from pannier.slicer.cut import Slice

LINEAR = "aten_linear_default"
"""What linear layers are called in generated source."""


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether packed weights are faster: bfloat16 on a CPU that multiplies it natively."""
    mkldnn = torch.ops.mkldnn
    return (
        dtype is torch.bfloat16
        and device.type == "cpu"
        and torch.backends.mkldnn.is_available()
        and mkldnn._is_mkldnn_bf16_supported()
        and all(hasattr(mkldnn, name) for name in ("_reorder_linear_weight", "_linear_pointwise"))
    )


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., in] to [..., out], by a weight [out, in] that is packed or plain."""
    if not weight.is_mkldnn:
        return plain_linear(x, weight, bias)
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product


def pack_weights(
    source: str, slices: Sequence[Slice], weights: Mapping[str, torch.Tensor]
) -> list[tuple[torch.Tensor, ...]]:
    """Each slice's weights in its function's order, packed where the function does nothing but multiply by them."""
    packable = dict(_packable(source))
    packed: dict[int, torch.Tensor] = {}  # by address: tied weights are packed once

    def pack(weight: torch.Tensor) -> torch.Tensor:
        if weight.data_ptr() not in packed:
            packed[weight.data_ptr()] = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        return packed[weight.data_ptr()]

    return [
        tuple(
            pack(weights[name]) if f"w{slot}" in packable[piece.function] else weights[name]
            for slot, name in enumerate(piece.weights)
        )
        for piece in slices
    ]


def _packable(source: str) -> Iterator[tuple[str, frozenset[str]]]:
    """Of each function, the weights that are only ever the second argument of a linear layer."""
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef):
            calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
            multiplied = [_name(call.args[1]) for call in calls if _name(call.func) == LINEAR]
            loads = [_name(node) for node in ast.walk(function) if isinstance(getattr(node, "ctx", None), ast.Load)]
            yield function.name, frozenset(w for w in multiplied if loads.count(w) == multiplied.count(w))


def _name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else ""
