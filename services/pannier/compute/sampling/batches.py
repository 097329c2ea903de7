"""How many rows of logits are worked on at once."""

import torch

CPU_ELEMENTS = 1 << 17  # what a chain of operators keeps in a core's own cache
DEVICE_ELEMENTS = 1 << 24  # what keeps a device busy, and its temporaries small


def rows_at_once(logits: torch.Tensor) -> int:
    """Rows of logits [U, V] in a batch, at least 1."""
    elements = CPU_ELEMENTS if logits.device.type == "cpu" else DEVICE_ELEMENTS
    return max(1, elements // logits.shape[-1])
