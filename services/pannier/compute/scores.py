"""How likely given tokens were: log-probabilities of a prompt's own tokens."""

from collections.abc import Sequence
from itertools import islice

import torch

from pannier.compute.sampling import report
from pannier.slicer.model import Head
from pannier.wire import WireError
from pannier.wire import messages as m

HEAD_ELEMENTS = 1 << 25
"""Logits that are there at once: a whole prompt's would be larger than the model, and each pass costs half a layer."""


def score(head: Head, scores: Sequence[m.Score], scored_tokens: torch.Tensor, vocab_size: int) -> tuple[m.Scored, ...]:
    """The outcome of each score, of which token i is `scored_tokens[i]` (int32 [S]). Raises `WireError`.

    The head is run for chunks of the rows of all scores, so that logits [rows, V] never exceed `HEAD_ELEMENTS`.
    """
    if not scores:
        return ()
    rows = [s.row + i for s in scores for i in range(s.num_rows)]
    num_top = [s.top_logprobs for s in scores for _ in range(s.num_rows)]
    tokens = [t for s in scores for t in scored_tokens[s.first_token : s.first_token + s.num_rows].tolist()]
    if len(tokens) != len(rows) or not all(0 <= token < vocab_size for token in tokens):
        raise WireError("a score names tokens that are not among the step's scored tokens, or not in the vocabulary")
    at_once = max(1, HEAD_ELEMENTS // vocab_size)
    reported: list[m.TokenLogprob] = []
    for start in range(0, len(rows), at_once):
        chunk = slice(start, start + at_once)
        logits = head(torch.tensor(rows[chunk], dtype=torch.int64))
        of_chunk = zip(tokens[chunk], report(logits, tokens[chunk], num_top[chunk]), strict=True)
        reported += [m.TokenLogprob(token, *logprobs) for token, logprobs in of_chunk]
    left = iter(reported)
    return tuple(m.Scored(s.sequence, s.position, tuple(islice(left, s.num_rows))) for s in scores)
