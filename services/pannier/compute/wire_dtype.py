"""What links carry in another element type than the model computes in: converted here, once each way, and counted."""

from collections import Counter

import structlog
import torch

from pannier.runtime.strict import Converted

LARGEST_HALF = torch.finfo(torch.float16).max
log = structlog.get_logger()


class WireDtype:
    """Between the type of the model and that of the links; nothing happens where they are the same.

    What is too large for float16 becomes its largest number, not infinity: that would make the row's whole answer NaN.
    Such values are counted. Where it is `strict` to have only one type, the first conversion is an error instead.
    """

    def __init__(self, own: torch.dtype, wire: torch.dtype, counters: Counter[str], *, strict: bool = False) -> None:
        self.itemsize = wire.itemsize
        self._own = own
        self._strict = strict
        self._wire = wire
        self._counters = counters
        self._num_saturated: torch.Tensor | None = None
        """Counted on the device, where looking at it would wait for all that was launched."""

    def sent(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """q, k and v of one call as links carry them. Raises `Converted` where it is strict."""
        tensors = (q, k, v)
        if self._own == self._wire:
            return tensors
        if self._strict:
            raise Converted(f"dtype_strict: the model computes {self._own} and links carry {self._wire}")
        self._counters["converted_to_wire"] += 1
        sizes = [tensor.numel() for tensor in tensors]
        together = q.new_empty(sum(sizes), dtype=self._wire)
        converted = [part.view(each.shape) for part, each in zip(together.split(sizes), tensors, strict=True)]
        for target, source in zip(converted, tensors, strict=True):
            target.copy_(source)
        if self._wire == torch.float16:
            self._saturate(together)
        return tuple(converted)

    def received(self, answer: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """An answer on the device in what is computed with it: the model's type, or that in which parts are merged."""
        if answer.dtype != self._own:
            self._counters["converted_from_wire"] += 1
        return answer.to(device, dtype)

    def settle(self) -> None:
        """Between steps, when the device is waited for anyway: see whether anything was too large."""
        num_saturated = 0 if self._num_saturated is None else int(self._num_saturated)
        self._num_saturated = None
        if not num_saturated:
            return
        if not self._counters["saturated_values"]:
            log.warning("values were too large for float16 and are cut; kv_dtype float32 would hold them")
        self._counters["saturated_values"] += num_saturated

    def _saturate(self, converted: torch.Tensor) -> None:
        count = converted.isinf().sum()
        self._num_saturated = count if self._num_saturated is None else self._num_saturated + count
        converted.clamp_(-LARGEST_HALF, LARGEST_HALF)
