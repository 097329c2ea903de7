"""Which token each sample gets. Work is done for the rows that need it, a cache-sized batch of them at a time."""

from collections.abc import Iterator, Sequence

import torch

from pannier.compute.sampling.batches import rows_at_once
from pannier.compute.sampling.filters import cut_min_p, cut_top_k, likelihoods
from pannier.compute.sampling.race import keys_of, race
from pannier.compute.sampling.rules import apply_rules
from pannier.compute.sampling.state import State
from pannier.wire import messages as m


class CannotDraw(Exception):
    """No token is left for a sequence, and which."""


def draw(
    logits: torch.Tensor,
    rows: Sequence[int],
    samples: Sequence[m.Sample],
    states: Sequence[State | None],
    masks: torch.Tensor,
) -> torch.Tensor:
    """Draw sample i from row `rows[i]` of logits [U, V], under the rules of `states[i]`.

    `masks` [M, W] int32 has bit t % 32 of word t // 32 set where token t is allowed. Returns tokens int64 [samples] on
    the logits' device. A draw depends on its row, its rules, and (seed, index, position); on nothing beside it.
    Raises `CannotDraw`.
    """
    plain, ruled, drawn = _kinds(samples, states)
    if len(plain) == len(samples) and list(rows) == list(range(len(logits))):
        return logits.max(-1).indices  # in their own dtype, which is exact, and sooner than argmax
    tokens = torch.empty(len(samples), dtype=torch.int64, device=logits.device)
    if plain:
        tokens[_index(plain, logits)] = logits[_index([rows[i] for i in plain], logits)].max(-1).indices
    for group in (ruled, drawn):
        for batch in _batches(group, rows_at_once(logits)):
            of_batch = [samples[i] for i in batch]
            x = logits[_index([rows[i] for i in batch], logits)].float()
            apply_rules(x, of_batch, [states[i] for i in batch], masks)
            tokens[_index(batch, logits)] = _best(x, of_batch) if group is ruled else _drawn(x, of_batch)
    return tokens


def _kinds(samples: Sequence[m.Sample], states: Sequence[State | None]) -> tuple[list[int], list[int], list[int]]:
    """Numbers of the samples: greedy, greedy under rules, drawn; among the last, like stands beside like."""
    kinds: tuple[list[int], list[int], list[int]] = ([], [], [])
    for i, (sample, state) in enumerate(zip(samples, states, strict=True)):
        is_ruled = state is not None or sample.mask >= 0
        kinds[2 if sample.filters.temperature > 0 else int(is_ruled)].append(i)
    kinds[2].sort(key=lambda i: (samples[i].filters.top_p < 1, samples[i].filters.top_k > 0))
    return kinds


def _batches(group: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    return (group[start : start + size] for start in range(0, len(group), size))


def _best(x: torch.Tensor, samples: Sequence[m.Sample]) -> torch.Tensor:
    best, tokens = x.max(-1)
    _check_left(best, samples)
    return tokens


def _drawn(x: torch.Tensor, samples: Sequence[m.Sample]) -> torch.Tensor:
    """Tokens [B] drawn from x [B, V], which is used up."""
    best = x.amax(-1, keepdim=True)
    _check_left(best[:, 0], samples)
    filters = [sample.filters for sample in samples]
    p = likelihoods(x, best, filters)
    cut_top_k(p, filters)
    cut_min_p(p, filters)
    return race(p, keys_of(samples).to(p.device), filters)


def _check_left(best: torch.Tensor, samples: Sequence[m.Sample]) -> None:
    """Raise `CannotDraw` if the best logit [B] of a sample is -inf."""
    for i in best.isneginf().nonzero()[:, 0].tolist():
        raise CannotDraw(f"sequence {samples[i].sequence}: its mask and rules leave no token to draw")


def _index(places: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(places, dtype=torch.int64, device=like.device)
