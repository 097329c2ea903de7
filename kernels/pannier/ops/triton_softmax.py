"""The softmax that the attention kernels share: over tiles of keys, one after the other, in fp32.

The state of M rows is what they have seen so far: the `largest` score [M]; the weighted values `acc` [M, Dv] and the
sum of weights `total` [M], both relative to that score. Scores are multiples of log 2, since exp2 is what a GPU has.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def begin(rows: tl.constexpr, v_size: tl.constexpr):
    """The state before the first key."""
    acc = tl.zeros((rows, v_size), dtype=tl.float32)
    largest = tl.full((rows,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((rows,), dtype=tl.float32)
    return acc, largest, total


@triton.jit
def score(q, k, scale, softcap: tl.constexpr):
    """Scores [M, N] of q [M, Dk] and k [N, Dk], both of the dtype that is multiplied; `scale` is [1, N] or a number."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if softcap != 0.0:
        # tanh with an exponential that can't overflow.
        fading = tl.exp2(tl.abs(scores) * (-2.0 * LOG2_E / softcap))
        capped = softcap * (1.0 - fading) / (1.0 + fading)
        scores = tl.where(scores < 0, -capped, capped)
    return scores * LOG2_E


@triton.jit
def add(acc, largest, total, scores, seen, v, v_scale):
    """The state after N more keys, of which a row sees those where `seen` [M, N].

    v [N, Dv] in the dtype that is multiplied, to be multiplied by `v_scale`, [1, N] or a number; of keys that aren't
    seen it may be NaN.
    """
    scores = tl.where(seen, scores, float("-inf"))
    highest = tl.maximum(largest, tl.max(scores, axis=1))
    base = tl.where(highest == float("-inf"), 0.0, highest)  # of a row that has seen nothing yet
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(largest - base)
    scaled = tl.where(seen, weights * v_scale, 0.0)
    acc = tl.dot(scaled.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return acc, highest, total * shrink + tl.sum(weights, axis=1)


@triton.jit
def finish(acc, largest, total):
    """The partial (o [M, Dv], l [M]) of a state."""
    empty = total == 0.0
    divisor = tl.where(empty, 1.0, total)
    lse = tl.where(empty, float("-inf"), (largest + tl.log2(divisor)) * LN_2)
    return acc / divisor[:, None], lse
