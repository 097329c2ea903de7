"""Generated source does what the graph does: operators, names, and when a value is set free."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx as fx

from pannier.slicer.clean import clean
from pannier.slicer.refusal import Unsupported
from pannier.slicer.source import SHORTER, function_source, module_source

aten = torch.ops.aten
X, Y = torch.randn(3, 4), torch.randn(3, 4)
EXAMPLES: dict[str, tuple[Any, ...]] = {
    "aten.add.Tensor": (X, 0.5),
    "aten.cat.default": ([X, Y], -1),
    "aten.cos.default": (X,),
    "aten.embedding.default": (X, torch.tensor([[2, 0]]), 0),
    "aten.linear.default": (X, Y, torch.randn(3)),
    "aten.matmul.default": (X, Y.T),
    "aten.mean.dim": (X, [-1], True),
    "aten.mul.Tensor": (X, Y),
    "aten.neg.default": (X,),
    "aten.pow.Tensor_Scalar": (X, 2),
    "aten.reshape.default": (X.T, [2, -1]),
    "aten.rsqrt.default": (X.abs(),),
    "aten.select.int": (X, 0, 1),
    "aten.silu.default": (X,),
    "aten.sin.default": (X,),
    "aten.sub.Tensor": (X, Y),
    "aten.tanh.default": (X,),
    "aten.to.dtype": (X, torch.bfloat16),
    "aten.transpose.int": (X, 0, 1),
    "aten.unsqueeze.default": (X, 1),
    "aten.view.default": (X, [2, 6]),
}


@pytest.mark.parametrize("name", SHORTER)
def test_a_shorter_way_leads_to_the_same_operator(name: str) -> None:
    want = eval(f"torch.ops.{name}")(*EXAMPLES[name])
    got = eval(SHORTER[name])(*EXAMPLES[name])
    assert got.dtype == want.dtype
    assert torch.equal(got, want)


def traced(function: Callable[..., Any], *examples: torch.Tensor) -> fx.Graph:
    """The graph of a function of tensors, in torch's own operators, with what each value looks like."""
    program = torch.export.export(Wrapped(function), examples, strict=False)
    graph: fx.Graph = program.graph
    return graph


class Wrapped(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(*inputs)


def as_function(graph: fx.Graph) -> tuple[str, Callable[..., tuple[torch.Tensor, ...]]]:
    """A graph's source, and the function that it defines."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    outputs: Any = graph.output_node().args[0]
    source = module_source(nodes, {"f": function_source([], inputs, nodes, list(outputs), {}).replace("NAME", "f")})
    namespace: dict[str, Any] = {}
    exec(source, namespace)
    return source, namespace["f"]


def test_source_computes_what_the_graph_computes() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        halves = torch.chunk(x * float("inf"), 2, dim=1)
        filled = y.masked_fill(y > 0, float("-inf")).to(torch.float64)
        return torch.where(halves[0].isnan(), 0.0, 1.0) + filled[:, :2].clamp(min=-5)

    _, compiled = as_function(traced(function, X, Y))
    (got,) = compiled(torch.device("cpu"), (), X, Y)
    assert torch.equal(got, function(X, Y))


def test_values_are_freed_after_their_last_use() -> None:
    source, _ = as_function(traced(lambda x, y: (x.sin() + y.cos()).tanh(), X, Y))
    lines = [line.strip() for line in source.splitlines() if line.startswith("    ")]
    assert [line for line in lines if line.startswith("del")] == ["del a0", "del a1", "del v0, v1", "del v2"]


def test_control_flow_has_no_source() -> None:
    def branch(x: torch.Tensor) -> torch.Tensor:
        chosen: torch.Tensor = torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))
        return chosen

    with pytest.raises(Unsupported, match="cond"):
        as_function(traced(branch, X))


def operators(graph: fx.Graph) -> list[str]:
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


def test_conversions_that_change_nothing_are_removed() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        x = x.to(torch.float32).contiguous().view(3, 4).clone().detach()
        x.unsqueeze(0)  # unused
        return torch.nn.functional.dropout(x, 0.5, training=False).sin()

    graph = traced(function, X)
    clean(graph)
    assert operators(graph) == ["aten.sin.default"]


def test_conversions_that_change_something_stay() -> None:
    graph = traced(lambda x: x.to(torch.bfloat16).t().contiguous().view(2, 6), X)
    clean(graph)
    assert len(operators(graph)) == 4


def test_a_copy_stays_where_something_is_written_in_place() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        copied = x.clone()
        copied.add_(1)
        return copied + x

    graph = traced(function, X)
    clean(graph)
    assert "aten.clone.default" in operators(graph)
    _, compiled = as_function(graph)
    assert torch.equal(compiled(torch.device("cpu"), (), X)[0], function(X))
