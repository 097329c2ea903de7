"""Elements of eight bits in registers: int8, and fp8 (e4m3, without infinities) as the byte it is stored as.

Not every GPU converts fp8, and Triton's interpreter neither; its bits are moved to where fp16 has them. fp16 counts
exponents from -15 where e4m3 does from -7, so that this gives the number divided by 256. A scale makes up for it.
"""

import triton
import triton.language as tl

INT8_LARGEST = tl.constexpr(127.0)
FP8_LARGEST = tl.constexpr(448.0)
FP8_FACTOR = tl.constexpr(256.0)
ROUNDING = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding it leaves no bits behind the point, rounded half to even


@triton.jit
def widen(stored, is_fp8: tl.constexpr, has_fp8: tl.constexpr):
    """Stored elements as numbers, those of fp8 divided by 256: [...] of fp16, or int8 as it is.

    stored [...] int8, or uint8 for fp8; `has_fp8`: the GPU converts fp8.
    """
    if is_fp8:
        if has_fp8:
            stored = stored.to(tl.float8e4nv, bitcast=True).to(tl.float16) * (1.0 / FP8_FACTOR)
        else:
            bits = stored.to(tl.int16)
            stored = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return stored


@triton.jit
def factor_of(is_fp8: tl.constexpr):
    """What `widen` divided by."""
    return FP8_FACTOR if is_fp8 else 1.0


@triton.jit
def quantise(row, is_fp8: tl.constexpr):
    """The stored elements of a row [size] of fp32, and its scale; see `pannier.ops.quantise`."""
    bits = row.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    most_bits = tl.max(bits, axis=0)  # magnitudes have the order of their bits, behind them infinity and NaN
    is_finite = most_bits < 0x7F800000
    largest = FP8_LARGEST if is_fp8 else INT8_LARGEST
    scale = tl.div_rn(tl.where(is_finite, most_bits, 0).to(tl.float32, bitcast=True), largest)
    multiples = tl.div_rn(tl.where(is_finite, row, 0.0), tl.where(scale > 0.0, scale, 1.0))
    multiples = tl.minimum(tl.maximum(multiples, -largest), largest)
    return _narrow(multiples, is_fp8), tl.where(is_finite, scale, float("nan"))


@triton.jit
def _narrow(number, is_fp8: tl.constexpr):
    """The nearest stored element of each number, half to even."""
    if is_fp8:
        sign = (number.to(tl.int32, bitcast=True) >> 24) & 0x80
        size = tl.abs(number)
        bits = size.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - 7) << 3)
        subnormal = ((size * 512.0 + ROUNDING) - ROUNDING).to(tl.int32)
        stored = (sign | tl.where(size < 0.015625, subnormal, normal)).to(tl.uint8)
    else:
        stored = ((number + ROUNDING) - ROUNDING).to(tl.int8)
    return stored
