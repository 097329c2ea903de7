"""Attention as it is defined, slow and obvious, and a model run with it: what the proof compares with."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from pannier.slicer.cut import Call
from pannier.slicer.model import Attend, SlicedModel


def attend(call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Attention of a sequence's last Q tokens over all of its S tokens, themselves included.

    Args:
        call: scale, window and soft-cap.
        q: [Q, H, Dk].
        k: [S, G, Dk].
        v: [S, G, Dv].
        sinks: [H], one more score for each head, with no value; or None.

    Returns:
        [Q, H, Dv].
    """
    group = call.q_heads // call.kv_heads
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,shd->hqs", q.float(), k.float()) * call.scale
    if call.softcap:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    scores = scores.masked_fill(~_visible(len(q), len(k), call.window, q.device), float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, len(q), 1)], -1)
    weights = scores.softmax(-1)[..., : len(k)]
    return torch.einsum("hqs,shd->qhd", weights, v.float()).to(q.dtype)


def _visible(queries: int, tokens: int, window: int, device: torch.device) -> torch.Tensor:
    """Which tokens a query sees: those up to itself, the last `window` of them if there is one. [Q, S], bool."""
    position = torch.arange(tokens - queries, tokens, device=device)[:, None]
    token = torch.arange(tokens, device=device)[None]
    return (token <= position) & (token > position - (window or tokens))


@dataclass
class Past:
    """What attention keeps of one sequence: the keys and values of each call, one tensor per step.

    Attributes:
        withheld: index of a call that is to forget everything, or None.
    """

    withheld: int | None = None
    keys: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    values: dict[int, list[torch.Tensor]] = field(default_factory=dict)

    def copy(self, withheld: int) -> "Past":
        """The same past, of which one call will know nothing."""
        keys, values = ({call: list(kept) for call, kept in held.items()} for held in (self.keys, self.values))
        return Past(withheld, keys, values)

    def attend(
        self, call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """Appends k and v, then attends to all that is kept."""
        keys, values = self.keys.setdefault(call.index, []), self.values.setdefault(call.index, [])
        if call.index == self.withheld:
            keys.clear()
            values.clear()
        keys.append(k)
        values.append(v)
        return attend(call, q, torch.cat(keys), torch.cat(values), sinks)


@dataclass(frozen=True)
class Part:
    """Some tokens of one sequence in a packed step: ids[start:stop], after `past`."""

    ids: torch.Tensor
    start: int
    stop: int
    past: Past


def run_packed(model: SlicedModel, parts: Sequence[Part], rows: Iterable[int]) -> torch.Tensor:
    """Runs one step over packed parts of sequences: logits [R, V] of the packed `rows`."""
    ids = torch.cat([part.ids[part.start : part.stop] for part in parts])
    positions = torch.cat([torch.arange(part.start, part.stop) for part in parts])
    running = model.run(ids, positions, torch.tensor(list(rows), dtype=torch.int64))
    answer = None
    while True:
        try:
            asked = next(running) if answer is None else running.send(answer)
        except StopIteration as finished:
            logits: torch.Tensor = finished.value
            return logits
        answer = _answer(asked, parts, model.sinks(asked.call))


def _answer(asked: Attend, parts: Sequence[Part], sinks: torch.Tensor | None) -> torch.Tensor:
    sizes = [part.stop - part.start for part in parts]
    pieces = zip(parts, *(x.split(sizes) for x in (asked.q, asked.k, asked.v)), strict=True)
    return torch.cat([part.past.attend(asked.call, q, k, v, sinks) for part, q, k, v in pieces])
