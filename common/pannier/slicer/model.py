"""A model in slices, ready to run: no I/O, no sockets, whatever the device."""

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pannier.slicer.cut import Call, Cut
from pannier.slicer.export import IDS, POSITIONS, ROWS
from pannier.slicer.packed import LINEAR, can_pack, linear, pack_weights
from pannier.slicer.stage import passed_on

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
    """n attention calls and the n + 1 slices between them, or those of them that are one stage's.

    Attributes:
        calls: what attention has to do, in the order of the calls.
        vocab_size: V.
        dtype: what the weights, q, k and v are in.
        device: where the weights are.
        max_model_len: positions must lie below it.
        source: the distinct slices as Python source, which says shape and dtype of every value.
        slices: which function each slice is, and what it takes and gives.
        span: numbers of the slices that can be run here, all of them unless this is one stage of several.
        takes_on: names of the values that the first of them needs of a stage before it, in order.
        passes_on: names of the values that later stages need of these slices, in order.
        weights: of the slices of the span, name -> parameter, buffer or constant; tied ones are the same tensor. Those
            of linear layers that were packed are not among them: only the packed form is kept.
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
        span: range | None = None,
    ) -> None:
        self.calls = cut.calls
        self.vocab_size = cut.vocab_size
        self.dtype = dtype
        self.device = device
        self.max_model_len = max_model_len
        self.source = cut.source
        self.weights = weights
        self.slices = cut.slices
        self.span = range(len(cut.slices)) if span is None else span
        self.takes_on = passed_on(cut.slices, self.span.start) if self.span.start else ()
        self.passes_on = passed_on(cut.slices, self.span.stop)
        self._functions = _compile(cut.source)
        self.weight_bytes = sum({weight.data_ptr(): weight.nbytes for weight in weights.values()}.values())
        own = cut.slices[self.span.start : self.span.stop]
        if can_pack(dtype, device):
            packed = pack_weights(cut.source, own, weights)
            used = {id(weight) for of_slice in packed for weight in of_slice}
            sinks = {call.sinks for call in cut.calls}
            self.weights = {name: w for name, w in weights.items() if id(w) in used or name in sinks}
        else:
            packed = [tuple(weights[name] for name in piece.weights) for piece in own]
        self._weights_of = dict(zip(self.span, packed, strict=True))

    @property
    def held(self) -> list[torch.Tensor]:
        """The weights as slices take them, packed ones too."""
        return [weight for of_slice in self._weights_of.values() for weight in of_slice]

    def run(self, ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> Run:
        """Runs one step of a whole model: a generator that yields `Attend`, is sent attention outputs, returns logits.

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
        values: Values = {IDS: ids, POSITIONS: positions}
        yield from self.run_stage(values)
        return self.head(values)(rows)

    def run_stage(self, values: Values) -> Generator[Attend, torch.Tensor, None]:
        """Runs this stage's slices up to its last attention call, that included.

        Args:
            values: name -> what is alive before the stage: `positions`, and `ids` before the first one or what the
                stage before it passes on. As this runs it comes to hold what is alive behind it, by the names of
                `takes_on` and `passes_on`.
        """
        for call in self.calls[self.span.start : self.span.stop]:
            # No name holds q, k and v here, so they are freed as soon as the caller lets go of them.
            values[self.slices[call.index].output] = yield Attend(call, *self._run_slice(call.index, values))

    def head(self, values: Values) -> Head:
        """What gives logits, of the last stage, once it has run.

        It is called for some rows at a time or not: logits [R, V] of all rows of a prompt can be larger than all the
        rest. It is the last slice, the last layer's part behind attention and the head, of which only the head minds
        the rows: each call costs as much as that part.
        """

        def head(rows: torch.Tensor) -> torch.Tensor:
            (logits,) = self._run_slice(len(self.calls), {**values, ROWS: rows.to(self.device)})
            return logits

        return head

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
