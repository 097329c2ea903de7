"""All rows with one indexed write for keys and one for values."""

import torch
from torch import Tensor

from pannier.ops.quantise import quantise


def store_kv(
    keys: Tensor, values: Tensor, slots: Tensor, k: Tensor, v: Tensor, scales: tuple[Tensor, Tensor] | None = None
) -> None:
    """See `pannier.ops.store_kv`."""
    block_size = keys.shape[2]
    where = (slots // block_size, slots % block_size)
    for number, (stored, rows) in enumerate(((keys, k), (values, v))):
        if scales is None:
            _put(stored, where, rows.to(stored.dtype))
        else:
            multiples, found = quantise(rows, stored.dtype)
            _put(stored.view(torch.int8), where, multiples.view(torch.int8))  # fp8 can't be indexed
            _put(scales[number], where, found)


def _put(stored: Tensor, where: tuple[Tensor, Tensor], rows: Tensor) -> None:
    # With heads behind tokens, [P, K, G, ...], the two indices stand together and each picks one row of all heads.
    stored.transpose(1, 2).index_put_(where, rows)
