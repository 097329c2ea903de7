"""A model in slices, ready to run: no I/O, no sockets, whatever the device."""

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pannier.slicer.cut import Call, Cut

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
        weights: name -> parameter, buffer or constant; tied ones are the same tensor.
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
        values: Values = {"ids": ids, "positions": positions, "rows": rows}
        return self.resume(values, 0)

    def resume(self, values: Values, first: int) -> Run:
        """Runs from slice `first` on, given the values alive before it (which are used up)."""
        for call in self.calls[first:]:
            # No name holds q, k and v here, so they are freed as soon as the caller lets go of them.
            values[self.slices[call.index].output] = yield Attend(call, *self._run_slice(call.index, values))
        (logits,) = self._run_slice(len(self.calls), values)
        return logits

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
    return namespace
