"""From logits to tokens: greedy and temperature, with log-probabilities."""

from collections.abc import Sequence

import torch

from pannier.wire import messages as m

_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: spreads neighbouring seeds and positions apart
_64_BITS = 2**64 - 1


def draw(logits: torch.Tensor, samples: Sequence[m.Sample]) -> tuple[torch.Tensor, tuple[m.Drawn, ...]]:
    """Draw sample i from logits [i, V].

    Returns the tokens int64 [samples] on the logits' device, and what is reported of them. Log-probabilities are
    those of the model itself, before temperature. A draw is a function of seed and position only.
    """
    best, tokens = logits.max(-1)  # in their own dtype, which is exact, and sooner than argmax
    for i, sample in enumerate(samples):
        if sample.temperature > 0:
            # The best becomes 0, which a temperature near 0 doesn't make infinite.
            tokens[i] = _race((logits[i].float() - best[i].float()) / sample.temperature, sample)
    return tokens, _report(logits, tokens, samples)


def _race(logits: torch.Tensor, sample: m.Sample) -> torch.Tensor:
    """The token whose exponential clock rings first: drawn with the softmax's probabilities."""
    generator = torch.Generator().manual_seed(_mix(sample.seed, sample.position))
    clocks = torch.empty(logits.shape[-1]).exponential_(generator=generator)
    return (logits - clocks.log().to(logits.device)).argmax(-1)


def _mix(seed: int, position: int) -> int:
    """One number of both, each bit of which depends on all of theirs: torch's CPU generator takes the low 32 only."""
    z = (seed * _GOLDEN + position) & _64_BITS
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & _64_BITS
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & _64_BITS
    return z ^ z >> 31


def _report(logits: torch.Tensor, tokens: torch.Tensor, samples: Sequence[m.Sample]) -> tuple[m.Drawn, ...]:
    wanted = [i for i, sample in enumerate(samples) if sample.top_logprobs >= 0]
    logprobs = dict(zip(wanted, logits[wanted].float().log_softmax(-1), strict=True)) if wanted else {}
    return tuple(
        _drawn(sample.sequence, token, logprobs.get(i), sample.top_logprobs)
        for i, (sample, token) in enumerate(zip(samples, tokens.tolist(), strict=True))
    )


def _drawn(sequence: int, token: int, logprobs: torch.Tensor | None, num_top: int) -> m.Drawn:
    if logprobs is None:
        return m.Drawn(sequence, token, None, ())
    values, indices = logprobs.topk(min(num_top, logprobs.shape[-1]))
    top = tuple(m.TopLogprob(*pair) for pair in zip(indices.tolist(), values.tolist(), strict=True))
    return m.Drawn(sequence, token, float(logprobs[token]), top)
