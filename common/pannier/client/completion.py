"""A whole answer, put together from its chunks."""

from collections.abc import Sequence
from dataclasses import dataclass

from pannier.wire.messages import Delta, TokenLogprob, Usage


@dataclass(frozen=True)
class CompletionOutput:
    """One of the outputs that a request gave.

    Attributes:
        text: the generated text, without the prompt, up to the stop string if there was one.
        tokens: the generated token ids.
        logprobs: one for each token if they were asked for, else none.
        finish_reason: "stop" (an end token or a stop string), "length", "abort" or "error".
    """

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: str


@dataclass(frozen=True)
class Completion:
    """What a request gave: as many outputs as its `n`. What only one output has, the first one's is found here too.

    Attributes:
        outputs: in the order of their index.
        prompt_logprobs: one for each token of the prompt but the first, if they were asked for, else none.
        usage: tokens of the prompt and of all outputs.
    """

    outputs: tuple[CompletionOutput, ...]
    prompt_logprobs: tuple[TokenLogprob, ...]
    usage: Usage

    @property
    def text(self) -> str:
        """Of the first output."""
        return self.outputs[0].text

    @property
    def tokens(self) -> tuple[int, ...]:
        """Of the first output."""
        return self.outputs[0].tokens

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        """Of the first output."""
        return self.outputs[0].logprobs

    @property
    def finish_reason(self) -> str:
        """Of the first output."""
        return self.outputs[0].finish_reason


def join(chunks: Sequence[Delta]) -> Completion:
    """The completion that these chunks, all of one request, are."""
    usage = chunks[-1].usage
    assert usage is not None
    indices = sorted({chunk.index for chunk in chunks})
    return Completion(
        outputs=tuple(_join_output([chunk for chunk in chunks if chunk.index == index]) for index in indices),
        prompt_logprobs=tuple(logprob for chunk in chunks for logprob in chunk.prompt_logprobs),
        usage=usage,
    )


def _join_output(chunks: Sequence[Delta]) -> CompletionOutput:
    finish_reason = chunks[-1].finish_reason
    assert finish_reason is not None
    return CompletionOutput(
        text="".join(chunk.text for chunk in chunks),
        tokens=tuple(token for chunk in chunks for token in chunk.tokens),
        logprobs=tuple(logprob for chunk in chunks for logprob in chunk.logprobs),
        finish_reason=finish_reason,
    )
