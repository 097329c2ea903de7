"""`dtype_strict`: what should be in one element type for good is guarded, and converting it is an error.

Guarded are weights and KV blocks, the tensors whose conversion in every step would cost as much as the step. Casts of
activations are a model's own business, and how precisely it computes.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SMALL = 0.001
"""Of all that is guarded: what is smaller may be converted, as the weights of routers are."""


class Converted(Exception):
    """Raised in place of a conversion, with what it is."""


class Guard(TorchDispatchMode):
    """While it is entered, an operator that gives a guarded tensor's numbers in another float type is an error.

    It looks at every operator, from Python: a run under guard is a check, and slower.
    """

    def __init__(self, what: str, tensors: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._what = what
        kept = list(tensors)
        total = sum(_nbytes(tensor) for tensor in kept)
        self._kept = [tensor for tensor in kept if tensor.dim() > 1 and _nbytes(tensor) >= SMALL * total]
        self._ids = {id(tensor) for tensor in self._kept}
        self._storages = {_storage(tensor) for tensor in self._kept} - {0}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        first = result[0] if isinstance(result, tuple | list) and result else result
        if isinstance(first, Tensor) and first.is_floating_point() and not _makes_its_own(func._opname):
            for given in tree_leaves((args, kwargs)):
                if isinstance(given, Tensor) and given.dtype != first.dtype and self._guards(given):
                    raise Converted(self._sentence(func._opname, given, first.dtype))
        return result

    def _guards(self, tensor: Tensor) -> bool:
        return id(tensor) in self._ids or (tensor.dim() > 1 and _storage(tensor) in self._storages)

    def _sentence(self, op: str, source: Tensor, target: torch.dtype) -> str:
        types = f"{_name(source.dtype)} to {_name(target)}"
        return f"dtype_strict: {op} converts {self._what} {list(source.shape)} from {types}"


def _makes_its_own(op: str) -> bool:
    """Whether its result has nothing of its inputs' numbers."""
    return op.startswith("new_") or op.endswith("_like")


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _storage(tensor: Tensor) -> int:
    """An address that all views of a tensor share; 0 where it has a layout of its own, such as oneDNN's."""
    return 0 if tensor.is_mkldnn else tensor.untyped_storage().data_ptr()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
