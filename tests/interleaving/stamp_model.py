"""A model whose every token is an exact function of all that it attended to.

Keys and values are stamps: small integers made of what a row knows and where it stands. With queries of zero,
attention is a mean, so mean times count is the exact sum of the stamps that were seen. A key that is missing, doubled,
stale or not a number changes that sum, with it the row's stamps in the next call, and the text from there on.

`continuation` computes the same text from the prompt alone, without tensors, blocks or steps.
"""

from collections.abc import Generator, Iterable, Sequence
from math import isfinite
from zlib import crc32

import torch

from pannier.slicer import Attend, Call
from pannier.slicer.model import Head, SlicedModel, Values

from .violation import Violation

VOCABULARY = 211
STAMP_BITS = 9
"""So that a sum of some dozens of stamps is exact in fp32 after it was divided and multiplied again."""
ROUNDING = 0.05


class StampModel(SlicedModel):
    """Runs like any sliced model; has no slices, weights or source."""

    takes_on = passes_on = ("known",)

    def __init__(self, calls: Sequence[Call], max_model_len: int, span: range | None = None) -> None:
        self.calls = tuple(calls)
        self.span = range(len(calls) + 1) if span is None else span
        self.vocab_size = VOCABULARY
        self.dtype = torch.float32
        self.device = torch.device("cpu")
        self.max_model_len = max_model_len

    def run_stage(self, values: Values) -> Generator[Attend, torch.Tensor, None]:
        """What is alive between two calls is what each row knows."""
        known: list[int] = values["known" if self.span.start else "ids"].tolist()
        places: list[int] = values["positions"].tolist()
        for call in self.calls[self.span.start : self.span.stop]:
            stamps = [_stamps(call, state, place) for state, place in zip(known, places, strict=True)]
            q = torch.zeros(len(known), call.q_heads, call.k_size)
            k = torch.tensor([[_digits(stamp, call.k_size) for stamp in row] for row in stamps])
            v = torch.tensor([[_digits(stamp, call.v_size) for stamp in row] for row in stamps])
            seen = yield Attend(call, q, k, v)
            known = [_sum_up(call, means, place) for means, place in zip(seen.tolist(), places, strict=True)]
        values["known"] = torch.tensor(known)

    def head(self, values: Values) -> Head:
        """Logits [R, V] that leave no doubt."""
        known: list[int] = values["known"].tolist()

        def head(rows: torch.Tensor) -> torch.Tensor:
            logits = torch.zeros(len(rows), VOCABULARY)
            for number, row in enumerate(rows.tolist()):
                logits[number, known[row] % VOCABULARY] = 1.0
            return logits

        return head

    def sinks(self, call: Call) -> torch.Tensor | None:
        """A sink of 0 weighs as much as one more key whose value is 0."""
        return None if call.sinks is None else torch.zeros(call.q_heads)


def continuation(calls: Sequence[Call], prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The `num_tokens` tokens behind the prompt."""
    tokens = list(prompt)
    stored: list[list[list[list[float]]]] = [[] for _ in calls]
    totals = [[[0.0] * call.v_size for _ in range(call.kv_heads)] for call in calls]
    for place in range(len(prompt) + num_tokens - 1):
        known = tokens[place]
        for call in calls:
            stored[call.index].append([_digits(stamp, call.v_size) for stamp in _stamps(call, known, place)])
            _slide(totals[call.index], stored[call.index], call.window)
            ratio = call.q_heads // call.kv_heads
            known = _digest(totals[call.index][head // ratio] for head in range(call.q_heads))
        if place + 1 == len(tokens):
            tokens.append(known % VOCABULARY)
    return tokens[len(prompt) :]


def _slide(totals: list[list[float]], stored: list[list[list[float]]], window: int) -> None:
    """Add what was stored last, and take away what the window leaves behind."""
    for head, total in enumerate(totals):
        for i in range(len(total)):
            total[i] += stored[-1][head][i]
            if window and len(stored) > window:
                total[i] -= stored[-1 - window][head][i]


def _stamps(call: Call, known: int, place: int) -> list[int]:
    """One number per KV head."""
    return [crc32(b"%d %d %d %d" % (call.index, head, known, place)) for head in range(call.kv_heads)]


def _digits(stamp: int, count: int) -> list[float]:
    return [float(stamp >> STAMP_BITS * i & (1 << STAMP_BITS) - 1) for i in range(count)]


def _sum_up(call: Call, means: list[list[float]], place: int) -> int:
    """What a row knows once it has seen the means [H, Dv] over its keys."""
    count = min(place + 1, call.window or place + 1) + (call.sinks is not None)
    sums = [[mean * count for mean in row] for row in means]
    if not all(isfinite(total) and abs(total - round(total)) < ROUNDING for row in sums for total in row):
        raise Violation(f"call {call.index}, position {place}: attention saw what it must not see: {sums}")
    return _digest([float(round(total)) for total in row] for row in sums)


def _digest(sums: Iterable[list[float]]) -> int:
    return crc32(repr(list(sums)).encode())
