"""All rows with one indexed write for keys and one for values."""

from torch import Tensor


def store_kv(keys: Tensor, values: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """See `pannier.ops.store_kv`."""
    block_size = keys.shape[2]
    where = (slots // block_size, slots % block_size)
    # With heads behind tokens, [P, K, G, D], the two indices stand together and each picks one row of all heads.
    keys.transpose(1, 2).index_put_(where, k.to(keys.dtype))
    values.transpose(1, 2).index_put_(where, v.to(values.dtype))
