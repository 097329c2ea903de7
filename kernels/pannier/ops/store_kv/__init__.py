"""Write the keys and values of new tokens into their blocks."""

from torch import Tensor

from pannier.ops.gpu import uses_triton
from pannier.ops.quantise import check_scales
from pannier.ops.store_kv import batched, cpu


def store_kv(
    keys: Tensor, values: Tensor, slots: Tensor, k: Tensor, v: Tensor, scales: tuple[Tensor, Tensor] | None = None
) -> None:
    """Store row n of `k` and `v` in slot `slots[n]`, cast to the cache's dtype, or quantised where it has scales.

    keys [P, G, K, Dk] and values [P, G, K, Dv] are written in place; slots [N] int64 is block * K + offset, each slot
    at most once, all in the cache; k [N, G, Dk], v [N, G, Dv] of any float dtype. A cache in int8 or float8_e4m3fn has
    `scales`, of keys and of values, each [P, G, K] in fp32; see `pannier.ops.quantise`.

    Raises ValueError when the shapes don't fit, IndexError for a slot behind the last one; on a GPU, where knowing it
    would mean waiting, such a row is left out.
    """
    _check(keys, values, slots, k, v)
    check_scales(keys, values, scales)
    if uses_triton(keys.device):
        from pannier.ops.store_kv import triton

        triton.store_kv(keys, values, slots, k, v, scales)
    elif cpu.takes(keys, values, slots, k, v):
        cpu.store_kv(keys, values, slots, k, v, scales)
    else:
        batched.store_kv(keys, values, slots, k, v, scales)


def _check(keys: Tensor, values: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    _, kv_heads, _, k_size = keys.shape
    v_size = values.shape[3]
    rows = slots.shape[0]
    if k.shape != (rows, kv_heads, k_size):
        raise ValueError(f"k has shape {list(k.shape)}; {rows} slots of this cache take {[rows, kv_heads, k_size]}")
    if v.shape != (rows, kv_heads, v_size):
        raise ValueError(f"v has shape {list(v.shape)}; {rows} slots of this cache take {[rows, kv_heads, v_size]}")


__all__ = ["store_kv"]
