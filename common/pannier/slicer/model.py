"""A model in slices, ready to run: no I/O, no sockets, whatever the device."""

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pannier.slicer.cut import Call, Cut
from pannier.slicer.export import IDS, POSITIONS, ROWS
from pannier.slicer.packed import LINEAR, can_pack, linear, pack_weights

Values = dict[str, Any]  # tensors, and a few sizes


@dataclass(frozen=True)
class Attend:
    """What a running model asks for: attention over these rows, and over what the caller keeps of their past.

    Attributes:
        call: which attention call it is.
        q: [T, H, Dk].
        k: [T, G, Dk].
        v: [T, G, Dv].
    """

    call: Call
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


Run = Generator[Attend, torch.Tensor, torch.Tensor]
Head = Callable[[torch.Tensor], torch.Tensor]
"""From rows [R] to their logits [R, V]."""


class SlicedModel:
    """n attention calls and the n + 1 slices between them.

    Attributes:
        calls: what attention has to do, in the order of the calls.
        vocab_size: V.
        dtype: what the weights, q, k and v are in.
        device: where the weights are.
        max_model_len: positions must lie below it.
        source: the distinct slices as Python source, which says shape and dtype of every value.
        slices: which function each slice is, and what it takes and gives.
        weights: name -> parameter, buffer or constant; tied ones are the same tensor. Those of linear layers that were
            packed are not among them: only the packed form is kept.
        weight_bytes: of all of them, tied ones counted once.
    """

    def __init__(
        self,
        cut: Cut,
        weights: Mapping[str, torch.Tensor],
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int,
    ) -> None:
        self.calls = cut.calls
        self.vocab_size = cut.vocab_size
        self.dtype = dtype
        self.device = device
        self.max_model_len = max_model_len
        self.source = cut.source
        self.weights = weights
        self.slices = cut.slices
        self._functions = _compile(cut.source)
        self.weight_bytes = sum({weight.data_ptr(): weight.nbytes for weight in weights.values()}.values())
        if can_pack(dtype, device):
            self._weights_of = pack_weights(cut.source, cut.slices, weights)
            used = {id(weight) for of_slice in self._weights_of for weight in of_slice}
            sinks = {call.sinks for call in cut.calls}
            self.weights = {name: w for name, w in weights.items() if id(w) in used or name in sinks}
        else:
            self._weights_of = [tuple(weights[name] for name in piece.weights) for piece in cut.slices]

    def run(self, ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> Run:
        """Runs one step: a generator that yields `Attend`, is sent attention outputs, and returns logits.

        Rows of any number of sequences may be packed together: a row knows of others only what attention tells it.
        Use it as `logits = yield from model.run(...)`, or drive it with `send`.

        Args:
            ids: token ids [T], int64.
            positions: [T] int64, counted from 0 in each sequence.
            rows: [R] int64, the rows whose logits are wanted.

        Yields:
            `Attend`, once per call, in order; the answer to send is the attention output [T, H, Dv].

        Returns:
            logits [R, V].
        """
        head = yield from self.run_to_head(ids, positions)
        return head(rows)

    def run_to_head(self, ids: torch.Tensor, positions: torch.Tensor) -> Generator[Attend, torch.Tensor, Head]:
        """Like `run`, but returns the last slice instead of running it, to be called for some rows at a time or not.

        Logits [R, V] of all rows of a prompt can be larger than all the rest. The last slice is the last layer's part
        behind attention and the head, of which only the head minds the rows: each call costs as much as that part.
        """
        values: Values = {IDS: ids, POSITIONS: positions}
        yield from self.run_slices(values, range(len(self.calls)))

        def head(rows: torch.Tensor) -> torch.Tensor:
            (logits,) = self._run_slice(len(self.calls), {**values, ROWS: rows.to(self.device)})
            return logits

        return head

    def run_slices(self, values: Values, span: range) -> Generator[Attend, torch.Tensor, None]:
        """Runs some consecutive slices, for a model whose slices are spread over several workers.

        Args:
            values: name -> what is alive before the first of them (`ids`, `positions` and `rows` before slice 0); as
                this runs it comes to hold what is alive after the last of them (`logits` after the last of all).
            span: numbers of the slices; a slice's attention call belongs to it.
        """
        for index in span:
            output = self.slices[index].output
            if index == len(self.calls):
                (values[output],) = self._run_slice(index, values)
            else:
                # No name holds q, k and v here, so they are freed as soon as the caller lets go of them.
                values[output] = yield Attend(self.calls[index], *self._run_slice(index, values))

    def sinks(self, call: Call) -> torch.Tensor | None:
        """The sinks [H] of a call, or None."""
        return None if call.sinks is None else self.weights[call.sinks]

    def _run_slice(self, index: int, values: Values) -> list[torch.Tensor]:
        """Runs one slice, and leaves in `values` only what later ones need."""
        piece = self.slices[index]
        given = self._functions[piece.function](
            self.device, self._weights_of[index], *(values[name] for name in piece.takes)
        )
        values.update(zip(piece.gives, given, strict=True))
        result = [values[name] for name in piece.result]
        for name in piece.drops:
            del values[name]
        return result


def _compile(source: str) -> dict[str, Callable[..., tuple[Any, ...]]]:
    """The functions that generated source defines; `cache` has checked that the source is ours."""
    namespace: dict[str, Any] = {}
    exec(compile(source, "<slices>", "exec"), namespace)
    namespace[LINEAR] = linear
    return namespace
