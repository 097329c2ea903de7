"""Where the Triton kernels are tested: on a GPU if there is one, else on the CPU in Triton's interpreter.

Which of them it is, is decided when triton is imported, and the kernels: that happens here, before any test runs.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = {torch.float32: 1e-5, torch.bfloat16: 3e-3, torch.float16: 3e-3}
"""What kernels may differ from the reference, by the dtype of their inputs."""


@contextmanager
def interpreted() -> Iterator[None]:
    """Kernels that are imported or called inside are interpreted, unless there is a GPU."""
    if DEVICE.type == "cuda":
        yield
        return
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        yield
    finally:
        del os.environ["TRITON_INTERPRET"]


with interpreted():
    pytest.importorskip("triton", reason="the GPU's kernels need triton, which the extra `dev` brings")
    from pannier.ops.chunk_attention import triton as chunk_attention
    from pannier.ops.merge_partials import triton as merge_partials
    from pannier.ops.paged_attention import triton as paged_attention
    from pannier.ops.store_kv import triton as store_kv
    from pannier.ops.triton_device import Gpu, gpu_of

KIND = gpu_of(DEVICE)

__all__ = [
    "DEVICE",
    "DTYPES",
    "KIND",
    "Gpu",
    "chunk_attention",
    "interpreted",
    "merge_partials",
    "paged_attention",
    "store_kv",
]
