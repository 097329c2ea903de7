"""Slow and obvious: one token after the other."""

from torch import Tensor

from pannier.ops.quantise import quantise


def store_kv(
    keys: Tensor, values: Tensor, slots: Tensor, k: Tensor, v: Tensor, scales: tuple[Tensor, Tensor] | None = None
) -> None:
    """See `pannier.ops.store_kv`."""
    block_size = keys.shape[2]
    for row, slot in enumerate(slots.tolist()):
        block, offset = divmod(slot, block_size)
        for number, (stored, rows) in enumerate(((keys, k), (values, v))):
            if scales is None:
                stored[block, :, offset] = rows[row].to(stored.dtype)
            else:
                stored[block, :, offset], scales[number][block, :, offset] = quantise(rows[row], stored.dtype)
