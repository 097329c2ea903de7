"""Slow and obvious: one sample at a time, in plain numbers."""

from collections import Counter
from collections.abc import Sequence
from math import exp, inf, log1p

from pannier.wire import messages as m

_32_BITS = 2**32 - 1


def draw(
    logits: Sequence[float], sample: m.Sample, state: m.SamplerState | None = None, mask: Sequence[int] | None = None
) -> int:
    """The token that a sample gets from logits [V]; `mask` [W] has bit t % 32 of word t // 32 set if t is allowed."""
    changed = change(logits, state, mask)
    if sample.filters.temperature == 0:
        return max(range(len(changed)), key=changed.__getitem__)
    likely = probabilities(changed, sample.filters)
    speeds = [p / clock for p, clock in zip(likely, clocks(sample, len(likely)), strict=True)]
    return max(range(len(speeds)), key=speeds.__getitem__)


def change(
    logits: Sequence[float], state: m.SamplerState | None = None, mask: Sequence[int] | None = None
) -> list[float]:
    """Logits [V] after mask, bans, biases and penalties."""
    changed = list(logits)
    if mask is not None:
        changed = [x if mask[t // 32] >> t % 32 & 1 else -inf for t, x in enumerate(changed)]
    if state is None:
        return changed
    rules, outputs = state.rules, list(state.output_tokens)
    for *before, last in rules.bad_words:
        if outputs[max(0, len(outputs) - len(before)) :] == before:
            changed[last] = -inf
    if len(outputs) < rules.min_tokens:
        for token in rules.held_tokens:
            changed[token] = -inf
    for token, bias in rules.logit_bias:
        changed[token] += bias
    times, penalties = Counter(outputs), rules.penalties
    for token in {*state.prompt_tokens, *outputs}:
        x = changed[token]
        x = x / penalties.repetition if x > 0 else x * penalties.repetition
        changed[token] = x - penalties.frequency * times[token] - penalties.presence * (times[token] > 0)
    return changed


def probabilities(logits: Sequence[float], filters: m.Filters) -> list[float]:
    """What tokens [V] are drawn with, at a temperature above 0."""
    best = max(logits)
    p = [exp((x - best) / filters.temperature) for x in logits]
    if filters.top_k:
        p = [x if sum(y > x for y in p) < filters.top_k else 0.0 for x in p]
    p = [x if x >= filters.min_p else 0.0 for x in p]
    total = sum(p)
    p = [x if filters.top_p == 1 or sum(y for y in p if y > x) < filters.top_p * total else 0.0 for x in p]
    return [x / sum(p) for x in p]


def clocks(sample: m.Sample, count: int) -> list[float]:
    """When each of `count` tokens' clock rings, exponentially distributed."""
    key = 0
    for number in (sample.seed, sample.index, sample.position):
        key = (key + number + 0x9E3779B97F4A7C15) % 2**64
        key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        key = (key ^ key >> 27) * 0x94D049BB133111EB % 2**64
        key ^= key >> 31
    return [-log1p(-(_bits(key, token) + 0.5) / 2**31) for token in range(count)]


def _bits(key: int, token: int) -> int:
    x = (token * 0x9E3779B1 + key) & _32_BITS
    x = (x ^ x >> 16 ^ key >> 32) * 0x7FEB352D & _32_BITS
    x = (x ^ x >> 15) * 0x846CA68B & _32_BITS
    return (x ^ x >> 16) & 2**31 - 1
