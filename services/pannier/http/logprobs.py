"""Log-probabilities in the forms of OpenAI's two endpoints."""

from collections.abc import Iterable, Sequence
from math import isinf
from typing import Any

from pannier.http.vocabulary import Vocabulary
from pannier.wire.messages import TokenLogprob

LEAST = -9999.0
"""What stands for minus infinity, which JSON has no number for."""


def tokens_of(logprobs: Iterable[TokenLogprob]) -> set[int]:
    """All the tokens that they name."""
    return {token for each in logprobs for token in (each.token, *(top.token for top in each.top))}


def chat_logprobs(logprobs: Sequence[TokenLogprob], vocabulary: Vocabulary) -> dict[str, Any]:
    """`choices[].logprobs` of a chat; the tokens must be known."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        piece = vocabulary.piece(token)
        return {"token": vocabulary.text(token), "logprob": _number(logprob), "bytes": list(piece)}

    return {
        "content": [
            entry(each.token, each.logprob) | {"top_logprobs": [entry(top.token, top.logprob) for top in each.top]}
            for each in logprobs
        ]
    }


class CompletionLogprobs:
    """`choices[].logprobs` of a completion, whose offsets go on from chunk to chunk."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._offset = 0

    def first(self, token: int) -> dict[str, Any]:
        """Of a prompt's first token, which follows nothing."""
        text = self._vocabulary.text(token)
        self._offset += len(text)
        return {"tokens": [text], "token_logprobs": [None], "top_logprobs": [None], "text_offset": [0]}

    def next(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Of the tokens that follow; they must be known."""
        texts = [self._vocabulary.text(each.token) for each in logprobs]
        offsets = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [_number(each.logprob) for each in logprobs],
            "top_logprobs": [self._top(each) for each in logprobs],
            "text_offset": offsets,
        }

    def _top(self, of: TokenLogprob) -> dict[str, float]:
        """By text; of tokens that look alike, the most likely. The token itself is always among them."""
        likely: dict[str, float] = {self._vocabulary.text(of.token): _number(of.logprob)}
        for top in of.top:
            text = self._vocabulary.text(top.token)
            likely[text] = max(likely.get(text, LEAST), _number(top.logprob))
        return likely


def joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Several parts of one completion's log-probabilities as one."""
    return {name: [value for part in parts for value in part[name]] for name in parts[0]}


def _number(logprob: float) -> float:
    return LEAST if isinf(logprob) else logprob
