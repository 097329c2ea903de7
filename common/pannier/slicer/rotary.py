"""Freezes rotary embeddings whose frequencies depend on the longest position seen.

Long-rope and dynamic variants pick frequencies by the longest position in the batch, so a token's key would depend on
its neighbours, and cached keys would go stale. Frozen, every position uses the frequencies of the longest allowed one.
"""

from typing import Any

import torch

FROZEN = "frozen"


def freeze_rotary(model: torch.nn.Module, max_model_len: int) -> None:
    """Sets every rotary embedding of `model` to the frequencies that it uses at `max_model_len`, for good."""
    module: Any  # whose `rope_type` isn't a tensor, as a checker would think
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str) and _varies(kinds):
            _see_last_position(module, max_model_len)
            module.rope_type = FROZEN
        elif isinstance(kinds, dict) and any(map(_varies, kinds.values())):
            for layer_type in [name for name, kind in kinds.items() if _varies(kind)]:
                _see_last_position(module, max_model_len, layer_type)
            module.rope_type = {name: FROZEN if _varies(kind) else kind for name, kind in kinds.items()}


def _varies(kind: str) -> bool:
    return "dynamic" in kind or kind == "longrope"


def _see_last_position(module: torch.nn.Module, max_model_len: int, *layer_type: str) -> None:
    """Runs the embedding once at the last position: it stores the frequencies that it picks."""
    device = next(module.buffers()).device
    position = torch.tensor([[max_model_len - 1]], device=device)
    with torch.no_grad():
        module(torch.zeros(1, 1, 1, device=device), position, *layer_type)
