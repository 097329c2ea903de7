"""Cuts one graph at every attention call into slices, and finds slices that are the same.

Values get names. A slice is a function of named values (weights among them) to named values; a value that only passes
by is no argument of the slice, it just stays alive. So layers that do the same have the same function, and it is
written once.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from pannier.slicer.clean import clean
from pannier.slicer.export import IDS, POSITIONS, ROWS, Exported
from pannier.slicer.refusal import Unsupported
from pannier.slicer.source import function_source, letters, module_source

ATTEND = torch.ops.pannier.attend.default
MASK = torch.ops.pannier.causal_mask.default
LOGITS = "logits"


@dataclass(frozen=True)
class Call:
    """One attention call of a model.

    Attributes:
        index: counted from 0 in the order in which the model makes them.
        q_heads: H.
        kv_heads: G.
        k_size: Dk, also the size of a query head.
        v_size: Dv.
        scale: what q.k is multiplied by.
        window: how many tokens a row sees, itself included; 0 for all.
        softcap: a score s becomes softcap * tanh(s / softcap); 0 for none.
        sinks: name of the weight [H] that joins the softmax as one more column; None for none.
    """

    index: int
    q_heads: int
    kv_heads: int
    k_size: int
    v_size: int
    scale: float
    window: int
    softcap: float
    sinks: str | None


@dataclass(frozen=True)
class Slice:
    """What lies between two attention calls: a function, and the names of what it takes and gives.

    Attributes:
        function: its name in the generated source.
        weights: names of parameters, buffers and constants, in the function's order.
        takes: names of values, in the function's order.
        gives: names of values, in the function's order.
        result: names of q, k, v for the call that follows, or of the logits after the last slice.
        drops: names of values that nobody needs after the result is taken.
        output: name of what follows: the attention output, or `logits` after the last slice.
    """

    function: str
    weights: tuple[str, ...]
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    result: tuple[str, ...]
    drops: tuple[str, ...]
    output: str


@dataclass(frozen=True)
class Cut:
    """A whole model in slices.

    Attributes:
        calls: n attention calls.
        slices: n + 1 slices.
        source: a Python module with the distinct functions.
        constants: name -> tensor that belongs to the graph rather than to the model.
        vocab_size: V.
    """

    calls: tuple[Call, ...]
    slices: tuple[Slice, ...]
    source: str
    constants: dict[str, torch.Tensor]
    vocab_size: int


@dataclass(frozen=True)
class _Piece:
    """One slice as nodes of the graph."""

    nodes: list[fx.Node]
    weights: list[fx.Node]
    takes: list[fx.Node]
    gives: list[fx.Node]
    result: list[fx.Node]


def cut(exported: Exported) -> Cut:
    """Cuts `exported` (whose graph is changed) at every attention call.

    Raises:
        Unsupported: a call's mask or sinks are computed by the model, or it makes no call at all.
    """
    graph = exported.graph
    clean(graph)
    attends = [node for node in graph.nodes if node.target is ATTEND]
    if not attends:
        raise Unsupported("makes no attention call")
    weights = exported.weights | {name: f"constant.{name}" for name in exported.constants}
    calls = tuple(_call(index, node, weights) for index, node in enumerate(attends))
    pieces = [_piece(nodes, result, weights) for nodes, result in _split(graph)]
    sources = [_source(piece, graph) for piece in pieces]
    functions = {source: f"slice_{i}" for i, source in enumerate(dict.fromkeys(sources))}
    outputs = [*(node.name for node in attends), LOGITS]
    slices = tuple(
        _slice(functions[source], piece, drops, output, weights)
        for source, piece, drops, output in zip(sources, pieces, _drops(pieces), outputs, strict=True)
    )
    nodes = [node for piece in pieces for node in piece.nodes]
    text = module_source(nodes, {name: source.replace("NAME", name, 1) for source, name in functions.items()})
    used = {name for piece in slices for name in piece.weights}
    constants = {weights[n]: tensor for n, tensor in exported.constants.items() if weights[n] in used}
    (logits,) = pieces[-1].result
    return Cut(calls, slices, text, constants, int(logits.meta["val"].shape[-1]))


def _call(index: int, node: fx.Node, weights: dict[str, str]) -> Call:
    arguments: tuple[Any, ...] = node.args
    q, _, v, mask, sinks, scale, window, softcap = arguments
    if mask.target is not MASK:
        raise Unsupported(f"changes the mask before attention ({mask.name})")
    if window and window != mask.args[1]:
        raise Unsupported(f"gives attention a window of {window} and a mask with {mask.args[1] or 'none'}")
    if sinks is not None and sinks.name not in weights:
        raise Unsupported("computes its sinks")
    (rows, q_heads, k_size), (kv_rows, kv_heads, v_size) = q.meta["val"].shape, v.meta["val"].shape
    if str(rows) != str(kv_rows):
        raise Unsupported("attends to something other than its own rows")
    sinks_name = None if sinks is None else weights[sinks.name]
    return Call(index, q_heads, kv_heads, k_size, v_size, scale, mask.args[1], softcap, sinks_name)


def _split(graph: fx.Graph) -> Iterable[tuple[list[fx.Node], list[fx.Node]]]:
    """The nodes before each call with what it takes (q, k, v), and at last the rest with the logits."""
    nodes: list[fx.Node] = []
    for node in graph.nodes:
        if node.target is ATTEND:
            yield nodes, list(node.args[:3])
            nodes = []
        elif node.op == "output":
            yield nodes, list(node.args[0])
        elif node.op != "placeholder" and node.target is not MASK:
            nodes.append(node)


def _piece(nodes: list[fx.Node], result: list[fx.Node], weights: dict[str, str]) -> _Piece:
    own = set(nodes)
    inputs = _unique(value for node in nodes for value in node.all_input_nodes if value not in own)
    gives = [node for node in _unique([*result, *nodes]) if node in own and _leaves(node, own)]
    return _Piece(
        nodes=nodes,
        weights=[value for value in inputs if value.name in weights],
        takes=[value for value in inputs if value.name not in weights],
        gives=gives,
        result=result,
    )


def _leaves(node: fx.Node, own: set[fx.Node]) -> bool:
    """Whether a value is used outside of its slice (what a mask is made of doesn't count)."""
    return any(user not in own and user.target is not MASK for user in node.users)


def _source(piece: _Piece, graph: fx.Graph) -> str:
    placeholders = {node.target: node for node in graph.nodes if node.op == "placeholder"}
    symbols = letters([(placeholders[POSITIONS], "T"), (placeholders[IDS], "T"), (placeholders[ROWS], "R")])
    return function_source(piece.weights, piece.takes, piece.nodes, piece.gives, symbols)


def _drops(pieces: list[_Piece]) -> list[tuple[str, ...]]:
    """For each piece, the values for which it was the last to have a use."""
    last: dict[str, int] = {}
    for index, piece in enumerate(pieces):
        last |= {node.name: index for node in [*piece.takes, *piece.gives, *piece.result]}
    return [tuple(name for name, use in last.items() if use == index) for index in range(len(pieces))]


def _slice(function: str, piece: _Piece, drops: tuple[str, ...], output: str, weights: dict[str, str]) -> Slice:
    return Slice(
        function=function,
        weights=tuple(weights[node.name] for node in piece.weights),
        takes=_names(piece.takes),
        gives=_names(piece.gives),
        result=_names(piece.result),
        drops=drops,
        output=output,
    )


def _names(nodes: Iterable[fx.Node]) -> tuple[str, ...]:
    return tuple(node.name for node in nodes)


def _unique(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    return list(dict.fromkeys(nodes))
