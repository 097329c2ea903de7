"""Read memory and do nothing with it: the rate that attention over stored keys is measured against."""

import torch
from torch import Tensor

from pannier.ops.native import library


def read_stream(data: Tensor) -> None:
    """Read all of a contiguous tensor, once, with as many threads as the other operators take."""
    built = library()
    if data.device.type == "cpu" and built is not None:
        built.read_stream(built.parallel, torch.get_num_threads(), data.data_ptr(), data.numel() * data.itemsize)
    else:
        data.view(torch.float32).sum()


__all__ = ["read_stream"]
