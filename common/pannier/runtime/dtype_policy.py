"""Which element type is used for what, and why. No I/O: what a device does natively is measured elsewhere.

=========  =====================================================  ===========================
role       is                                                     chosen by
=========  =====================================================  ===========================
compute    what slices multiply                                   the compute worker
storage    weights as they are held                               the compute worker
logits     what tokens are drawn from                             the compute worker
kv         K and V in the blocks                                  the gateway, for all groups
wire       q, k, v and answers on links                           the gateway, for all groups
=========  =====================================================  ===========================
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import isfinite

from pannier.wire import Dtype

LARGEST_HALF = 65504.0
"""The largest number in float16; bfloat16 has the range of float32."""
SLOWER = 1.25
"""A narrow type that takes so many times as long as float32 is converted somewhere, whatever the processor says."""
NARROW = (Dtype.BFLOAT16, Dtype.FLOAT16)


@dataclass(frozen=True)
class Choice:
    """An element type and, in a few words, why it is this one."""

    dtype: Dtype
    reason: str


@dataclass(frozen=True)
class Range:
    """The largest numbers of a model, without their signs; infinity where one of them has no number any more.

    Attributes:
        weight: of all weights.
        activation: of what slices pass on, on a sample; 0 where none was run.
    """

    weight: float
    activation: float


def choose_compute(
    wanted: Dtype | None, stored: Dtype | None, native: Collection[Dtype], product_s: Mapping[Dtype, float]
) -> Choice:
    """What slices multiply.

    What is wanted; else as the weights are stored, bfloat16, or float16, the first that the device multiplies natively
    and, where that was measured, not more slowly than float32; else float32.

    Args:
        stored: what most weights in files are; None: there are no files.
        product_s: by type, seconds of a product of the model's own shape, where it was measured.
    """
    if wanted is not None:
        emulated = "" if wanted in native else ", though the device has to convert it"
        return Choice(wanted, f"asked for{emulated}")
    slow = []
    for dtype in dict.fromkeys((stored, *NARROW)):
        if dtype not in NARROW or dtype not in native:
            continue
        if is_slow(dtype, product_s):
            slow.append(_name(dtype))
            continue
        skipped = [_name(each) for each in NARROW[: NARROW.index(dtype)] if each not in native]
        return Choice(dtype, _why(dtype, stored, skipped, product_s))
    if slow:
        return Choice(Dtype.FLOAT32, f"{' and '.join(slow)} took longer in a product of this model's shape")
    return Choice(Dtype.FLOAT32, "the device multiplies no narrower type natively")


def is_slow(dtype: Dtype, product_s: Mapping[Dtype, float]) -> bool:
    """Whether it was measured to be slower than float32."""
    if dtype not in product_s or Dtype.FLOAT32 not in product_s:
        return False
    return product_s[dtype] > SLOWER * product_s[Dtype.FLOAT32]


def out_of_range(found: Range) -> str | None:
    """In a few words why a model can't be computed in float16; None if it can."""
    for what, largest in (("a weight", found.weight), ("an activation on a sample", found.activation)):
        if not largest <= LARGEST_HALF:
            size = f"of {largest:.3g} " if isfinite(largest) else ""
            return f"{what} {size}is too large for float16, which ends at {LARGEST_HALF:.0f}"
    return None


def in_range(found: Range) -> str:
    """What is said of a model that can."""
    activation = f", largest activation on a sample {found.activation:.3g}" if found.activation else ""
    return f"largest weight {found.weight:.3g}{activation}, of {LARGEST_HALF:.0f}"


def choose_storage(compute: Choice, stored: Dtype | None) -> Choice:
    """What weights are held as: what they are multiplied in, so that no step converts them."""
    if stored is None or stored is compute.dtype:
        return Choice(compute.dtype, "as it is computed")
    return Choice(compute.dtype, f"as it is computed; files hold {_name(stored)}, converted once")


def choose_logits() -> Choice:
    """What tokens are drawn from."""
    return Choice(Dtype.FLOAT32, "of the rows that are sampled, so that small probabilities don't vanish")


def choose_kv(own: Dtype, wanted: Dtype | None, native: Collection[Dtype]) -> Choice:
    """What K and V of a model that computes in `own` are stored in, on attention workers that compute `native`.

    What is wanted; else the model's own type where that is native, then float16, which is as wide as bfloat16, then
    float32.
    """
    if wanted is not None:
        return Choice(wanted, "asked for")
    if own in native:
        return Choice(own, "the model's own, native to all attention workers")
    instead = Dtype.FLOAT16 if Dtype.FLOAT16 in native else Dtype.FLOAT32
    return Choice(instead, f"an attention worker would have to convert {_name(own)}")


def choose_wire(own: Dtype, kv: Dtype, native: Collection[Dtype]) -> Choice:
    """What links carry: the narrower of the model's type and that of K and V, the latter if they are equally wide.

    So it is the compute worker that rounds, before it sends, and attention workers at most widen. 8 bits, which have
    scales, are only stored: links carry what would be without them.
    """
    if kv.has_scales:
        plain = choose_kv(own, None, native).dtype
        return Choice(choose_wire(own, plain, native).dtype, f"K and V are rounded to {_name(kv)} as they are stored")
    if own is kv:
        return Choice(kv, "what is computed and stored")
    if own in native and own.itemsize < kv.itemsize:
        return Choice(own, f"narrower than {_name(kv)}, in which K and V are stored")
    return Choice(kv, "as K and V are stored; the compute worker converts, once each way and call")


def _why(dtype: Dtype, stored: Dtype | None, emulated: list[str], product_s: Mapping[Dtype, float]) -> str:
    reasons = ["native"]
    if stored is dtype:
        reasons.append("as the weights are stored")
    if emulated:
        reasons.append(f"the device would have to convert {' and '.join(emulated)}")
    if dtype in product_s and Dtype.FLOAT32 in product_s:
        times = product_s[Dtype.FLOAT32] / product_s[dtype]
        reasons.append(f"{times:.1f}x as fast as float32 in a product of this model's shape")
    return ", ".join(reasons)


def _name(dtype: Dtype) -> str:
    return dtype.name.lower()
