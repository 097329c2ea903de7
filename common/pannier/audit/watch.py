"""Sees every operator that a model runs, below autograd and autocast, where a cast can't hide in something else.

What this can't see into: kernels that convert inside, regions that `torch.compile` made one, replayed CUDA graphs.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from pannier.audit.calls import Call, Origin, Value, fold, origin_of
from pannier.audit.clock import Clock

COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


class Watch(TorchDispatchMode):
    """While it is entered, every call goes into `calls`.

    In inference mode operators such as `to` and `linear` would arrive whole: they are taken apart first.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self._modules = _Stack(model)
        own = [*model.parameters(), *model.buffers()]
        self._origins: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self.stored = frozenset(_storage(tensor) for tensor in own) - {0}
        """Storages of the model's own tensors."""
        self._synchronise = _synchroniser(own)

    def keep(self, cache: object) -> None:
        """Note the keys and values that a model has kept, wherever they lie in `cache`."""
        for tensor in tensors_in(cache):
            self._origins[tensor] = Origin.CACHE

    def take(self) -> list[Call]:
        """The calls so far, which are forgotten here."""
        calls, self.calls = self.calls, []
        return calls

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch, and know which module is running."""
        with self._modules.followed(), self:
            yield

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), COMPOSITE):
            with self:
                whole = func.decompose(*args, **kwargs)
            if whole is not NotImplemented:
                return whole
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        inputs = tuple(self._value(tensor) for tensor in given)
        self._synchronise()
        started = Clock.now()
        result = func(*args, **kwargs)
        self._synchronise()
        seconds = Clock.now() - started
        first = result[0] if isinstance(result, tuple | list) and result else result
        output = self._output(first, func._opname, inputs) if isinstance(first, Tensor) else None
        pointwise, is_view = torch.Tag.pointwise in func.tags, _is_view(func._opname, inputs, output)
        self.calls.append(Call(self._modules.path, func._opname, inputs, output, pointwise, is_view, seconds))
        return result

    def _value(self, tensor: Tensor) -> Value:
        storage = _storage(tensor)
        origin = Origin.WEIGHT if storage in self.stored else self._origins.get(tensor, Origin.OTHER)
        return Value(tensor.dtype, tuple(tensor.shape), origin, _place(tensor), storage)

    def _output(self, tensor: Tensor, op: str, inputs: tuple[Value, ...]) -> Value:
        self._origins[tensor] = origin_of(op, inputs, tensor.numel())
        return self._value(tensor)


class _Stack:
    """Which module's `forward` is running."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._names = {module: fold(name) for name, module in model.named_modules()}
        self._running: list[str] = []

    @property
    def path(self) -> str:
        return self._running[-1] if self._running else fold("")

    @contextmanager
    def followed(self) -> Iterator[None]:
        hooks = []
        for module, name in self._names.items():
            hooks.append(module.register_forward_pre_hook(self._entered(name)))
            hooks.append(module.register_forward_hook(self._left, always_call=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self._running.clear()

    def _entered(self, name: str) -> Callable[..., None]:
        def enter(*_: Any) -> None:
            self._running.append(name)

        return enter

    def _left(self, *_: Any) -> None:
        if self._running:
            self._running.pop()


def _is_view(op: str, inputs: tuple[Value, ...], output: Value | None) -> bool:
    """Whether a result is its first input's memory, and nothing was written there."""
    shared = output is not None and output.storage != 0 and output.storage in [value.storage for value in inputs[:1]]
    return shared and not op.endswith("_")


def tensors_in(root: object) -> list[Tensor]:
    """Every tensor that can be reached from an object through attributes, lists and dictionaries."""
    found, seen, todo = [], set[int](), [root]
    while todo:
        item = todo.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, list | tuple | set):
            todo += item
        elif isinstance(item, dict):
            todo += item.values()
        elif hasattr(item, "__dict__") and not isinstance(item, torch.nn.Module | type | Callable):
            todo += vars(item).values()
    return found


def _storage(tensor: Tensor) -> int:
    """An address that all views of a tensor's memory share; 0 where it has none that can be known."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # a layout of its own, such as oneDNN's
        return 0


def _place(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


def _synchroniser(tensors: Iterable[Tensor]) -> Callable[[], None]:
    """What waits for the device, so that a call's time is its kernel's too; on a CPU it always is."""
    device = next((tensor.device for tensor in tensors), torch.device("cpu"))
    return (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else (lambda: None)
