"""All chunks with one call of `cpu.cpp`."""

import ctypes
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from pannier.ops.native import DTYPES, Library, library

SHARED_PRODUCTS = 2**21
"""So many multiplications take longer than waking the other threads."""


class _Call(ctypes.Structure):
    """`ChunkCall` of `cpu.cpp`, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "o", "lse", "lengths", "parallel")),
        *((name, ctypes.c_int64) for name in ("q_row", "q_head", "k_row", "k_head", "v_row", "v_head")),
        *((name, ctypes.c_int32) for name in ("num_chunks", "num_threads", "kv_heads", "heads_per_kv")),
        *((name, ctypes.c_int32) for name in ("k_size", "v_size", "window", "type")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    )


def takes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether this form does it: a build is there, and the tensors lie as it reads them."""
    return (
        q.device.type == "cpu"
        and library() is not None
        and q.dtype in DTYPES
        and q.dtype == k.dtype == v.dtype
        and q.stride(2) == k.stride(2) == v.stride(2) == 1
    )


def chunk_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], *, scale: float, window: int, softcap: float
) -> tuple[Tensor, Tensor]:
    """See `pannier.ops.chunk_attention`."""
    built = library()
    assert built is not None
    return attend_with(built, q, k, v, lengths, scale, window, softcap)


def attend_with(
    built: Library,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Sequence[int],
    scale: float,
    window: int,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """The same with the build at hand."""
    rows, heads, k_size = q.shape
    _, kv_heads, v_size = v.shape
    o = torch.empty(rows, heads, v_size)
    lse = torch.empty(rows, heads)
    listed = array("q", lengths)
    products = sum(length * (length + 1) // 2 for length in lengths) * heads * (k_size + v_size)
    call = _Call(
        q=q.data_ptr(), k=k.data_ptr(), v=v.data_ptr(), o=o.data_ptr(), lse=lse.data_ptr(),
        lengths=listed.buffer_info()[0], parallel=built.parallel,
        q_row=q.stride(0), q_head=q.stride(1), k_row=k.stride(0), k_head=k.stride(1), v_row=v.stride(0),
        v_head=v.stride(1),
        num_chunks=len(listed), num_threads=torch.get_num_threads() if products >= SHARED_PRODUCTS else 1,
        kv_heads=kv_heads, heads_per_kv=heads // kv_heads, k_size=k_size, v_size=v_size, window=window,
        type=DTYPES[q.dtype], scale=scale, softcap=softcap,
    )  # fmt: skip
    built.chunk_attention(ctypes.addressof(call))
    return o, lse
