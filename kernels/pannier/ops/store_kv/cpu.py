"""All rows with one call of `cpu.cpp`."""

import torch
from torch import Tensor

from pannier.ops.native import DTYPES, STORED_DTYPES, Library, library


def takes(keys: Tensor, values: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether this form does it: a build is there, and the tensors lie as it reads them."""
    return (
        keys.device.type == "cpu"
        and library() is not None
        and k.dtype in DTYPES
        and k.dtype == v.dtype
        and keys.dtype in STORED_DTYPES
        and keys.dtype == values.dtype
        and keys.is_contiguous()
        and values.is_contiguous()
        and slots.is_contiguous()
        and slots.dtype == torch.int64
        and k.stride(2) == 1
        and v.stride(2) == 1
    )


def store_kv(
    keys: Tensor, values: Tensor, slots: Tensor, k: Tensor, v: Tensor, scales: tuple[Tensor, Tensor] | None = None
) -> None:
    """See `pannier.ops.store_kv`."""
    built = library()
    assert built is not None
    store_with(built, keys, values, slots, k, v, scales)


def store_with(
    built: Library,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    k: Tensor,
    v: Tensor,
    scales: tuple[Tensor, Tensor] | None = None,
) -> None:
    """The same with the build at hand."""
    num_blocks, kv_heads, block_size, k_size = keys.shape
    failed = built.store_kv(
        built.parallel, torch.get_num_threads(), DTYPES[k.dtype], STORED_DTYPES[keys.dtype],
        slots.data_ptr(), slots.shape[0], num_blocks * block_size, kv_heads, block_size,
        keys.data_ptr(), k_size, k.data_ptr(), k.stride(0), k.stride(1),
        values.data_ptr(), values.shape[3], v.data_ptr(), v.stride(0), v.stride(1),
        *((None, None) if scales is None else (scales[0].data_ptr(), scales[1].data_ptr())),
    )  # fmt: skip
    if failed:
        raise IndexError(f"a slot is outside 0..{num_blocks * block_size - 1}: {slots.tolist()}")
