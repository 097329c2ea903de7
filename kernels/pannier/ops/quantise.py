"""Keys and values in 8 bits: each token's key or value of one head is multiples of a scale of its own, in fp32.

The scale is the largest magnitude over the largest number of the type, so the largest element is met exactly; elements
are divided by it and rounded to the nearest, ties to even. A row of zeros has the scale 0. A row that holds NaN or an
infinity is stored as zeros with the scale NaN: whoever attends to it gets NaN, as with other types, and nobody a
number that is wrong. Scales in fp16 would save 2 to 3 % of the bytes of heads of 64, but keys below 1e-3 would lose
digits, and values above 8e6 become infinite, which a model may well have in either.
"""

import torch
from torch import Tensor

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The largest number of each type that is stored with scales."""

SCALE = torch.float32


def is_scaled(dtype: torch.dtype) -> bool:
    """Whether a cache of this dtype has scales."""
    return dtype in LARGEST


def quantise(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows [..., size] of any float dtype as [..., size] of an 8-bit dtype and scales [...] in fp32."""
    rows = rows.float()
    scales = rows.abs().amax(dim=-1) / LARGEST[dtype]
    multiples = torch.where(scales.unsqueeze(-1) > 0, rows / scales.unsqueeze(-1), 0.0)
    multiples = multiples.clamp(-LARGEST[dtype], LARGEST[dtype])
    is_finite = rows.isfinite().all(dim=-1)
    multiples = multiples.masked_fill(~is_finite.unsqueeze(-1), 0.0)
    scales = scales.masked_fill(~is_finite, float("nan"))
    return (multiples.round() if dtype == torch.int8 else multiples).to(dtype), scales


def dequantise(stored: Tensor, scales: Tensor) -> Tensor:
    """What was stored, in fp32: [..., size] of an 8-bit dtype and scales [...]."""
    return stored.float() * scales.unsqueeze(-1)


def check_scales(keys: Tensor, values: Tensor, scales: tuple[Tensor, Tensor] | None) -> None:
    """Raise ValueError when a cache of 8 bits comes without its scales, another one with some, or they don't fit."""
    if not is_scaled(keys.dtype):
        if scales is not None:
            raise ValueError(f"a cache in {keys.dtype} has no scales")
        return
    if scales is None or keys.dtype != values.dtype:
        raise ValueError(f"keys in {keys.dtype} and values in {values.dtype} need one dtype, and scales")
    for each in scales:
        if each.shape != keys.shape[:3] or each.dtype != SCALE:
            raise ValueError(f"scales are {each.dtype} {list(each.shape)}; {SCALE} {list(keys.shape[:3])} is needed")
