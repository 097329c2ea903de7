"""Traces a model into one graph over packed rows, with each attention call marked."""

import inspect
from dataclasses import dataclass

import torch
import torch.fx as fx
from torch.export.graph_signature import InputKind
from transformers import PreTrainedModel

from pannier.slicer.attend import IMPLEMENTATION
from pannier.slicer.clean import writes
from pannier.slicer.refusal import Unsupported, one_line

IDS, POSITIONS, ROWS = "ids", "positions", "rows"
# Any two sizes of at least 2 will do: 0 and 1 would be taken for constants.
EXAMPLE_ROWS, EXAMPLE_WANTED = 13, 5


@dataclass(frozen=True)
class Exported:
    """One graph of a whole model.

    Attributes:
        graph: placeholders (`ids`, `positions`, `rows` and weights), calls of torch operators, one output [R, V].
        weights: placeholder name -> name of the parameter or buffer in the model.
        constants: placeholder name -> tensor that the trace made.
    """

    graph: fx.Graph
    weights: dict[str, str]
    constants: dict[str, torch.Tensor]


class Packed(torch.nn.Module):
    """The model over packed rows: ids [T], positions [T], rows [R] -> logits [R, V]."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.keeps_rows = "logits_to_keep" in inspect.signature(model.forward).parameters

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The logits of `rows`, computed for those alone where the model can."""
        wanted = {"logits_to_keep": rows} if self.keeps_rows else {}
        output = self.model(input_ids=ids[None], position_ids=positions[None], use_cache=False, **wanted)
        logits: torch.Tensor = output.logits[0]
        return logits if self.keeps_rows else logits[rows]


def export(model: PreTrainedModel) -> Exported:
    """Traces `model`, which is left under Pannier's attention implementation.

    Raises:
        Unsupported: the model has attention of its own, asks for attention of another kind, or can't be traced.
    """
    if not model._can_set_attn_implementation():
        raise Unsupported("has attention of its own, outside the library's attention interface")
    model.set_attn_implementation(IMPLEMENTATION)
    try:
        program = _trace(Packed(model))
    except Unsupported:
        raise
    except Exception as error:
        # A trace runs the model's own code, which may raise anything.
        raise Unsupported(f"can't be traced ({one_line(error)})") from error
    _check_guards(program)
    _check_nothing_is_kept(program)
    return _named(program)


def _trace(packed: Packed) -> torch.export.ExportedProgram:
    device = next(packed.model.parameters()).device
    ids = torch.arange(3, 3 + EXAMPLE_ROWS, device=device)
    rows = torch.arange(EXAMPLE_WANTED, device=device)
    dynamic = {0: torch.export.Dim.DYNAMIC}
    with torch.no_grad():
        return torch.export.export(
            packed, (ids, ids - 3, rows), dynamic_shapes=(dynamic, dynamic, dynamic), strict=False
        )


def _check_guards(program: torch.export.ExportedProgram) -> None:
    """Refuses a graph that is right for some numbers of rows only.

    What the trace assumed is a list of conditions; the only one that always holds is that ids and positions match.
    """
    sizes = [f"L['{name}'].size()[0]" for name in (IDS, POSITIONS)]
    allowed = {" == ".join(sizes), " == ".join(reversed(sizes))}
    if surprising := [g for g in program._guards_code if g not in allowed]:
        raise Unsupported(f"depends on the number of rows in a step ({surprising[0]})")


def _check_nothing_is_kept(program: torch.export.ExportedProgram) -> None:
    """Refuses a model that changes its buffers, or what it is given: the next step would see that."""
    inputs = {node for node in program.graph.nodes if node.op == "placeholder"}
    written = [node for node in program.graph.nodes if writes(node) and node.args[0] in inputs]
    if written or program.graph_signature.buffers_to_mutate:
        raise Unsupported("changes its own buffers as it runs")


def _named(program: torch.export.ExportedProgram) -> Exported:
    weights: dict[str, str] = {}
    constants: dict[str, torch.Tensor] = {}
    for spec in program.graph_signature.input_specs:
        name = spec.arg.name
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            assert spec.target is not None
            weights[name] = spec.target.removeprefix("model.")
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            constants[name] = program.constants[spec.target]
    return Exported(program.graph, weights, constants)
