"""A whole answer, put together from its chunks."""

from collections.abc import Sequence
from dataclasses import dataclass

from pannier.wire.messages import Delta, TokenLogprob, Usage


@dataclass(frozen=True)
class Completion:
    """What a request gave.

    Attributes:
        text: the generated text, without the prompt, up to the stop string if there was one.
        tokens: the generated token ids.
        logprobs: one for each token if they were asked for, else none.
        finish_reason: "stop" (an end token or a stop string), "length", "abort" or "error".
        usage: tokens of prompt and completion.
    """

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: str
    usage: Usage


def join(chunks: Sequence[Delta]) -> Completion:
    """The completion that these chunks, all of one request, are."""
    last = chunks[-1]
    assert last.finish_reason is not None
    assert last.usage is not None
    return Completion(
        text="".join(chunk.text for chunk in chunks),
        tokens=tuple(token for chunk in chunks for token in chunk.tokens),
        logprobs=tuple(logprob for chunk in chunks for logprob in chunk.logprobs),
        finish_reason=last.finish_reason,
        usage=last.usage,
    )
