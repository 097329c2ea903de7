"""Memory in pages of 2 MiB: blocks lie anywhere, and with small pages the processor keeps looking up where."""

import ctypes

from torch import Tensor

PAGE = 2**21
MADV_HUGEPAGE = 14


def ask_for_huge_pages(tensor: Tensor) -> bool:
    """Advise the system to back a tensor on CPU with huge pages, before it is first written; whether it agreed.

    It makes no difference but in speed. Attention over the same blocks, alternating with small pages on a busy machine:
    1.06 to 1.15 times as fast with 32 sequences of about 200 keys, 1.1 to 1.6 times with 4096.
    """
    start = -(-tensor.data_ptr() // PAGE) * PAGE
    size = (tensor.data_ptr() + tensor.numel() * tensor.itemsize - start) // PAGE * PAGE
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if size <= 0 or madvise is None:
        return False
    return bool(madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), MADV_HUGEPAGE) == 0)
