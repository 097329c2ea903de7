"""The operators of a model that is only traced: no weights, no device, any size."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch.export.graph_signature import InputKind
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from pannier.audit.calls import Call, Origin, Value, fold, origin_of
from pannier.slicer.clean import clean
from pannier.slicer.export import EXAMPLE_ROWS, EXAMPLE_WANTED, IDS, POSITIONS, ROWS, Packed, export
from pannier.slicer.refusal import Unsupported, one_line

LOOKS = {"reshape", "contiguous", "flatten", "expand_as"}
"""Views by intent, beside those that say so themselves."""


class CannotTrace(Exception):
    """Raised for a model whose code can't be traced; it can only be run."""


@dataclass(frozen=True)
class Graph:
    """A traced model.

    Attributes:
        graph: calls of operators, over T rows of which R are wanted.
        weights: of its inputs, those that are the model's own, with a number for each; tied ones have the same.
        vocabulary: logits of one row.
    """

    graph: fx.Graph
    weights: dict[str, int]
    vocabulary: int

    @property
    def stored(self) -> frozenset[int]:
        """The numbers of the model's own tensors."""
        return frozenset(self.weights.values())

    def calls(self, rows: int) -> list[Call]:
        """What is called for so many rows of which the last one's logits are wanted."""
        inputs = {node.name: node.meta.get("val") for node in self.graph.nodes if node.op == "placeholder"}
        sizes = {inputs[name].shape[0].node.expr: rows for name in (IDS, POSITIONS)}
        sizes[inputs[ROWS].shape[0].node.expr] = 1
        values: dict[fx.Node, Value] = {}
        found = []
        for node in self.graph.nodes:
            made = _value(node, sizes)
            if made is None:
                continue
            if node.op == "placeholder":
                number = self.weights.get(node.name, 0)
                origin = Origin.WEIGHT if number else Origin.OTHER
                values[node] = Value(made.dtype, made.shape, origin, number, number)
            elif isinstance(node.target, torch._ops.OpOverload):
                given = tuple(values[each] for each in node.all_input_nodes if each in values)
                op = node.target._opname
                values[node] = Value(made.dtype, made.shape, origin_of(op, given, made.elements))
                pointwise = torch.Tag.pointwise in node.target.tags
                found.append(Call(_path(node), op, given, values[node], pointwise, _is_view(node.target)))
        return found


def trace(config: PretrainedConfig, dtype: torch.dtype) -> Graph:
    """A model of this configuration without its weights. Raises `CannotTrace`.

    As Pannier slices it where it can be sliced, which leaves attention to one operator; else as it is.
    """
    model = _empty(config, dtype)
    numbers = _numbered(model)
    try:
        exported = export(model)
        graph, weights = exported.graph, exported.weights
    except Unsupported:
        graph, weights = _exported_as_it_is(_empty(config, dtype))
    clean(graph)
    (logits,) = next(node for node in graph.nodes if node.op == "output").args[0]
    size = int(logits.meta["val"].shape[-1])
    return Graph(graph, {node: numbers[name] for node, name in weights.items()}, size)


def _numbered(model: PreTrainedModel) -> dict[str, int]:
    """A number for every tensor of a model by its names, from 1; tied ones are one tensor."""
    own = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    seen: dict[int, int] = {}
    return {name: seen.setdefault(id(tensor), len(seen) + 1) for name, tensor in own}


def _empty(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    own = copy.deepcopy(config)  # slicing notes in it which attention the model has
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(own, dtype=dtype)
    model.train(False)
    return model


def _exported_as_it_is(model: PreTrainedModel) -> tuple[fx.Graph, dict[str, str]]:
    ids = torch.arange(3, 3 + EXAMPLE_ROWS, device="meta")
    rows = torch.arange(EXAMPLE_WANTED, device="meta")
    dynamic = {0: torch.export.Dim.DYNAMIC}
    try:
        with torch.no_grad():
            program = torch.export.export(
                Packed(model), (ids, ids - 3, rows), dynamic_shapes=(dynamic, dynamic, dynamic), strict=False
            )
    except Exception as error:
        raise CannotTrace(f"{model.config.model_type} can't be traced ({one_line(error)})") from error
    own = (InputKind.PARAMETER, InputKind.BUFFER)
    specs = [spec for spec in program.graph_signature.input_specs if spec.kind in own]
    return program.graph, {spec.arg.name: str(spec.target).removeprefix("model.") for spec in specs}


def _value(node: fx.Node, sizes: Mapping[Any, int]) -> Value | None:
    found: Any = node.meta.get("val")
    if isinstance(found, tuple | list) and found:
        found = found[0]
    if not isinstance(found, torch.Tensor):
        return None
    return Value(found.dtype, tuple(_size(size, sizes) for size in found.shape))


def _size(size: int | torch.SymInt, sizes: Mapping[Any, int]) -> int:
    return size if isinstance(size, int) else int(size.node.expr.subs(sizes))


def _path(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    names = [name for name, _ in stack.values() if not name.startswith("_empty")]
    return fold(names[-1].removeprefix("model").removeprefix(".") if names else "")


def _is_view(operator: torch._ops.OpOverload) -> bool:
    returned = [each.alias_info for each in operator._schema.returns]
    looks = any(alias is not None and not alias.is_write for alias in returned)
    return looks or operator._opname in LOOKS
