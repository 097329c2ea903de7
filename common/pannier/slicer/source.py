"""Writes slices as Python source: straight-line torch calls, every value set free after its last use.

Names are given by order of appearance, so two slices that do the same have the same source. Each line says what comes
out, so that the source can be read, and audited, without running it:

    v7 = aten_linear_default(v6, w1)  # bfloat16[1, T, 64]
"""

import math
import operator
from collections.abc import Iterable
from types import BuiltinFunctionType
from typing import Any

import torch
import torch.fx as fx

from pannier.slicer.refusal import Unsupported

HEADER = '''"""Slices of a model, written by the slicer: each takes weights and values, and gives values."""

import math
import operator

import torch

inf, nan = math.inf, math.nan
'''

# The same operators with the same arguments, by a shorter way through the dispatcher (1-4 us less a call).
SHORTER = {
    "aten.add.Tensor": "torch.add",
    "aten.cat.default": "torch.cat",
    "aten.cos.default": "torch.cos",
    "aten.embedding.default": "torch.embedding",
    "aten.linear.default": "torch.nn.functional.linear",
    "aten.matmul.default": "torch.matmul",
    "aten.mean.dim": "torch.mean",
    "aten.mul.Tensor": "torch.mul",
    "aten.neg.default": "torch.neg",
    "aten.pow.Tensor_Scalar": "torch.pow",
    "aten.reshape.default": "torch.reshape",
    "aten.rsqrt.default": "torch.rsqrt",
    "aten.select.int": "torch.select",
    "aten.silu.default": "torch.nn.functional.silu",
    "aten.sin.default": "torch.sin",
    "aten.sub.Tensor": "torch.sub",
    "aten.tanh.default": "torch.tanh",
    "aten.to.dtype": "torch.Tensor.to",
    "aten.transpose.int": "torch.transpose",
    "aten.unsqueeze.default": "torch.unsqueeze",
    "aten.view.default": "torch.Tensor.view",
}


def module_source(nodes: list[fx.Node], functions: dict[str, str]) -> str:
    """The source of a module with these `functions` (name -> source), which came from `nodes`."""
    operators = dict(sorted((operator_name(node.target), _operator(node.target)) for node in nodes))
    bindings = "\n".join(f"{name} = {value}" for name, value in operators.items())
    return "\n\n".join([HEADER + "\n" + bindings + "\n", *functions.values()])


def function_source(
    weights: list[fx.Node],
    takes: list[fx.Node],
    nodes: list[fx.Node],
    gives: list[fx.Node],
    symbols: dict[str, str],
) -> str:
    """The source of one slice under the name `NAME`: (device, weights, takes...) -> gives.

    Args:
        symbols: symbolic size -> shape letter.

    Raises:
        Unsupported: the graph holds something that has no source, such as control flow.
    """
    names = {node: f"w{i}" for i, node in enumerate(weights)} | {node: f"a{i}" for i, node in enumerate(takes)}
    names |= {node: f"v{i}" for i, node in enumerate(nodes)}
    lines = [f"def NAME({', '.join(['device', 'weights', *(names[n] for n in takes)])}):"]
    if weights:
        lines.append(f"    {', '.join(names[n] for n in weights)}, = weights")
    dying = _dying(takes, nodes, gives)
    for node in nodes:
        lines.append(f"    {names[node]} = {_expression(node, names)}{_comment(node, symbols)}")
        if dying[node]:
            lines.append(f"    del {', '.join(names[n] for n in dying[node])}")
    lines.append(f"    return ({''.join(names[n] + ', ' for n in gives)})")
    return "\n".join(lines) + "\n"


def operator_name(target: Any) -> str:
    """The name of an operator in generated source: `aten_mul_Tensor`, `operator_add`."""
    return _path(target).removeprefix("torch.ops.").replace(".", "_")


def _operator(target: Any) -> str:
    path = _path(target)
    return SHORTER.get(path.removeprefix("torch.ops."), path)


def _has_source(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) or _module_of(target) in ("operator", "math", "torch")


def _path(target: Any) -> str:
    """How Python names an operator.

    Raises:
        Unsupported: it is no operator, but control flow or a function of someone's own.
    """
    if isinstance(target, torch._ops.OpOverload):
        return f"torch.ops.{target.namespace}.{target._opname}.{target._overloadname}"
    if _has_source(target):
        return f"{_module_of(target)}.{target.__name__}"
    raise Unsupported(f"has {getattr(target, '__name__', target)} in its graph, which can't be written as source")


def _module_of(target: Any) -> str:
    if isinstance(target, BuiltinFunctionType) and getattr(operator, target.__name__, None) is target:
        return "operator"
    if getattr(math, getattr(target, "__name__", ""), None) is target:
        return "math"
    return "torch" if getattr(torch, getattr(target, "__name__", ""), None) is target else ""


def _expression(node: fx.Node, names: dict[fx.Node, str]) -> str:
    name = operator_name(node.target)
    positional = [_argument(a, names) for a in node.args]
    named = [f"{key}={_argument(value, names)}" for key, value in node.kwargs.items()]
    return f"{name}({', '.join([*positional, *named])})"


def _argument(value: Any, names: dict[fx.Node, str]) -> str:
    match value:
        case fx.Node():
            return names[value]
        case list() | tuple():
            return f"[{', '.join(_argument(item, names) for item in value)}]"
        case slice():
            return f"slice({', '.join(_argument(part, names) for part in (value.start, value.stop, value.step))})"
        case torch.device():
            return "device"
        case None | bool() | int() | float() | str() | torch.dtype() | torch.layout() | torch.memory_format():
            return repr(value)
    raise Unsupported(f"has a {type(value).__name__} in its graph, which can't be written as source")


def _dying(takes: list[fx.Node], nodes: list[fx.Node], gives: list[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """node -> the values that nobody needs after it."""
    last: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        last |= dict.fromkeys([node, *node.all_input_nodes], node)
    kept = set(gives)
    mortal = [value for value in [*takes, *nodes] if value in last and value not in kept]
    return {node: [value for value in mortal if last[value] is node] for node in nodes}


def _comment(node: fx.Node, symbols: dict[str, str]) -> str:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return ""
    shape = ", ".join(_size(size, symbols) for size in value.shape)
    return f"  # {str(value.dtype).removeprefix('torch.')}[{shape}]"


def _size(size: int | torch.SymInt, symbols: dict[str, str]) -> str:
    text = str(size)
    for symbol, letter in symbols.items():
        text = text.replace(symbol, letter)
    return text


def letters(inputs: Iterable[tuple[fx.Node, str]]) -> dict[str, str]:
    """Symbolic size -> shape letter, from placeholders [T] or [R] and their letters."""
    return {str(node.meta["val"].shape[0]): letter for node, letter in inputs}
