"""All segments with one call of `cpu.cpp`."""

import torch
from torch import Tensor

from pannier.ops.native import DTYPES, STORED_DTYPES, Library, library
from pannier.ops.paged_attention.batch import PagedBatch
from pannier.ops.paged_attention.cpu_plan import CpuGeometry


def takes(q: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether this form does it: a build is there, and the tensors lie as it reads them."""
    return (
        q.device.type == "cpu"
        and library() is not None
        and q.dtype in DTYPES
        and keys.dtype in STORED_DTYPES
        and keys.dtype == values.dtype
        and keys.is_contiguous()
        and values.is_contiguous()
        and q.stride(2) == 1
    )


def paged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    window: int,
    softcap: float,
    scales: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """See `pannier.ops.paged_attention`."""
    built = library()
    assert built is not None
    return attend_with(built, q, keys, values, batch, scale, window, softcap, scales)


def attend_with(
    built: Library,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    batch: PagedBatch,
    scale: float,
    window: int,
    softcap: float,
    scales: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The same with the build at hand."""
    rows, heads, k_size = q.shape
    num_blocks, kv_heads, block_size, v_size = values.shape
    row_stride, head_stride, _ = q.stride()
    geometry = CpuGeometry(
        scale, window, softcap, num_blocks, kv_heads, block_size, k_size, v_size, heads // kv_heads,
        row_stride, head_stride, q.dtype, keys.dtype, torch.get_num_threads(),
    )  # fmt: skip
    plan = batch.cpu_plan(geometry, built)
    o = torch.empty(rows, heads, v_size)
    lse = torch.empty(rows, heads)
    if not plan.covers_all:
        o.zero_()
        lse.fill_(float("-inf"))
    tensors = (q, keys, values, o, lse, *(scales or ()))
    nothing = [None] * (0 if scales else 2)
    built.paged_attention(plan.address, *(tensor.data_ptr() for tensor in tensors), *nothing)
    return o, lse
