"""Takes out of a traced graph what costs time and computes nothing."""

import torch
import torch.fx as fx

aten = torch.ops.aten

# Views and conversions: with equal shape, dtype and strides before and after, they do nothing.
IDENTITIES = {
    aten.alias.default,
    aten.contiguous.default,
    aten.detach.default,
    aten.detach_.default,
    aten.expand.default,
    aten.reshape.default,
    aten.slice.Tensor,
    aten.to.device,
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.type_as.default,
    aten.view.default,
}
COPIES = {aten.clone.default, aten.lift_fresh_copy.default, aten._to_copy.default}
DROPOUTS = {aten.dropout.default, aten.feature_dropout.default}


def clean(graph: fx.Graph) -> None:
    """Removes assertions, unused values, dropout, and conversions and views that change nothing."""
    _erase_unused(graph)
    copies_matter = any(writes(node) for node in graph.nodes)
    for node in list(graph.nodes):
        if node.op == "call_function" and _does_nothing(node, copies_matter):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    _erase_unused(graph)


def _erase_unused(graph: fx.Graph) -> None:
    for node in reversed(graph.nodes):
        if not node.users and node.op in ("call_function", "get_attr") and not writes(node):
            graph.erase_node(node)


def writes(node: fx.Node) -> bool:
    """Whether a node changes its first argument in place."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target is aten.detach_.default:
        return False
    return bool(node.target._schema.is_mutable)


def _does_nothing(node: fx.Node, copies_matter: bool) -> bool:
    if node.target in DROPOUTS:
        return node.args[2] is False
    if node.target in COPIES and copies_matter:
        return False
    return (node.target in IDENTITIES or node.target in COPIES) and _same(node.args[0], node)


def _same(before: object, after: fx.Node) -> bool:
    """Whether two nodes have equal dtype, shape and strides, symbolic sizes included."""
    if not isinstance(before, fx.Node):
        return False
    a, b = before.meta.get("val"), after.meta.get("val")
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor) or a.dtype != b.dtype:
        return False
    return _expressions(a.shape) == _expressions(b.shape) and _expressions(a.stride()) == _expressions(b.stride())


def _expressions(sizes: tuple[int | torch.SymInt, ...]) -> list[str]:
    return [str(size) for size in sizes]
