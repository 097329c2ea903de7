"""Memory for gathered keys and values, used again by call after call."""

import torch
from torch import Tensor


class Scratch:
    """Two tensors that grow to what was ever asked for. For one thread: the next `take` overwrites the last one's.

    Memory that is allocated anew for each call is handed back to the system and faulted in again, page by page; on CPU
    that takes longer than the gather.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def take(self, name: str, rows: int, like: Tensor) -> Tensor:
        """Uninitialised [rows, size] of the last size, dtype and device of `like`; one per `name` at a time."""
        size = like.shape[-1]
        key = (name, like.dtype, like.device)
        held = self._held.get(key)
        if held is None or held.numel() < rows * size:
            held = self._held[key] = like.new_empty(rows * size)
        return held[: rows * size].view(rows, size)
