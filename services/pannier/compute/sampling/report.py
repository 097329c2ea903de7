"""Log-probabilities as the gateway gets them: the model's own, before rules, temperature and filters."""

from collections.abc import Sequence

import torch

from pannier.compute.sampling.batches import rows_at_once
from pannier.wire import messages as m

TopLogprobs = tuple[float, tuple[m.TopLogprob, ...]]


def report(logits: torch.Tensor, tokens: Sequence[int], num_top: Sequence[int]) -> list[TopLogprobs]:
    """Of row i of logits [U, V]: the log-probability of token i, and the `num_top[i]` most likely ones."""
    if not tokens:
        return []
    own = logits.gather(1, torch.tensor(tokens, device=logits.device)[:, None])
    values, indices = logits.topk(min(max(num_top), logits.shape[-1]))  # in their own dtype: the order is the same
    total = torch.cat([row.float().logsumexp(-1, keepdim=True) for row in logits.split(rows_at_once(logits))])
    logprobs = (torch.cat([own, values], 1).float() - total).tolist()
    return [
        (of_row[0], tuple(m.TopLogprob(*pair) for pair in zip(likely[:count], of_row[1 : count + 1], strict=True)))
        for of_row, likely, count in zip(logprobs, indices.tolist(), num_top, strict=True)
    ]


def report_drawn(
    logits: torch.Tensor, rows: Sequence[int], samples: Sequence[m.Sample], tokens: Sequence[int]
) -> tuple[m.Drawn, ...]:
    """What the gateway is told of token i, drawn from row `rows[i]` of logits [U, V] for sample i."""
    wanted = [i for i, sample in enumerate(samples) if sample.top_logprobs >= 0]
    if not wanted:
        return tuple(m.Drawn(sample.sequence, token, None, ()) for sample, token in zip(samples, tokens, strict=True))
    chosen = logits[torch.tensor([rows[i] for i in wanted], device=logits.device)]
    reports = report(chosen, [tokens[i] for i in wanted], [samples[i].top_logprobs for i in wanted])
    of_sample = dict(zip(wanted, reports, strict=True))
    return tuple(
        m.Drawn(sample.sequence, token, *of_sample.get(i, (None, ())))
        for i, (sample, token) in enumerate(zip(samples, tokens, strict=True))
    )
