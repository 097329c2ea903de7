"""Slow and obvious: one token after the other."""

from torch import Tensor


def store_kv(keys: Tensor, values: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """See `pannier.ops.store_kv`."""
    block_size = keys.shape[2]
    for row, slot in enumerate(slots.tolist()):
        block, offset = divmod(slot, block_size)
        keys[block, :, offset] = k[row].to(keys.dtype)
        values[block, :, offset] = v[row].to(values.dtype)
