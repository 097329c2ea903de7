"""Numbers that look random and are a function of (seed, index, position, token): a generator that only counts.

No state goes from draw to draw, so it matters neither what is drawn beside a sample nor how often a step is repeated;
and it is integer arithmetic, so every device finds the same.
"""

from collections.abc import Iterable

import torch

_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: spreads neighbouring numbers apart
_64_BITS = 2**64 - 1
_TOKEN_FACTOR = 0x9E3779B1 - 2**32
_FIRST_FACTOR, _SECOND_FACTOR = 0x7FEB352D, 0x846CA68B - 2**32  # of a 32-bit finaliser known to mix well (lowbias32)


def key(numbers: Iterable[int]) -> int:
    """64 bits, as a signed number, each of which depends on all bits of all numbers (splitmix64, chained)."""
    z = 0
    for number in numbers:
        z = (z + number + _GOLDEN) & _64_BITS
        z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & _64_BITS
        z = ((z ^ z >> 27) * 0x94D049BB133111EB) & _64_BITS
        z ^= z >> 31
    return z - 2**64 if z >= 2**63 else z


def bits(keys: torch.Tensor, count: int) -> torch.Tensor:
    """31 random bits, int32 [B, count], from keys int32 [B, 2].

    Both halves of a key go in at different places, so two keys that share one of them have nothing in common.
    Products wrap around.
    """
    x = torch.arange(count, dtype=torch.int32, device=keys.device) * _TOKEN_FACTOR + keys[:, :1]
    scratch = torch.empty_like(x)
    _fold(x, 16, scratch)
    x.bitwise_xor_(keys[:, 1:]).mul_(_FIRST_FACTOR)
    _fold(x, 15, scratch)
    x.mul_(_SECOND_FACTOR)
    _fold(x, 16, scratch)
    return x.bitwise_and_(0x7FFFFFFF)


def exponentials(keys: torch.Tensor, count: int) -> torch.Tensor:
    """Exponentially distributed, fp32 [B, count]; finite, and above 0 (the smallest, which win, are the finest)."""
    # -u for u in (0, 1): fp32 may round the bits up to 2^31, so the factor stays below 2^-31.
    minus_u = bits(keys, count).float().add_(0.5).mul_(-(1 - 2**-23) * 2**-31)
    return minus_u.log1p_().neg_()


def _fold(x: torch.Tensor, count: int, scratch: torch.Tensor) -> None:
    """x ^= x >> count, as if x were unsigned."""
    torch.bitwise_right_shift(x, count, out=scratch)
    x.bitwise_xor_(scratch.bitwise_and_((1 << 32 - count) - 1))
