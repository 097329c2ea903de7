"""On a GPU: one program for each row and KV head."""

from torch import Tensor

from pannier.ops.store_kv.triton_kernels import store
from pannier.ops.triton_device import as_stored, is_fp8, launching_on, width_of


def store_kv(
    keys: Tensor, values: Tensor, slots: Tensor, k: Tensor, v: Tensor, scales: tuple[Tensor, Tensor] | None = None
) -> None:
    """See `pannier.ops.store_kv`. Raises ValueError also for blocks that aren't contiguous.

    A slot outside the cache isn't written and raises nothing: the host would have to wait for the GPU to know it.
    """
    if not keys.is_contiguous() or not values.is_contiguous():
        raise ValueError("keys and values must be contiguous")
    k, v = (tensor if tensor.stride(2) == 1 else tensor.contiguous() for tensor in (k, v))
    num_blocks, kv_heads, block_size, k_size = keys.shape
    v_size = values.shape[3]
    if not len(slots):
        return
    with launching_on(keys.device):
        store[len(slots), kv_heads](
            as_stored(keys), as_stored(values), *(scales or (None, None)),
            slots.contiguous(), k, v, *k.stride()[:2], *v.stride()[:2], num_blocks * block_size,
            kv_heads=kv_heads, block_size=block_size, scaled=scales is not None, is_fp8=is_fp8(keys.dtype),
            k_size=k_size, v_size=v_size, k_width=width_of(k_size), v_width=width_of(v_size), num_warps=1,
        )  # fmt: skip
