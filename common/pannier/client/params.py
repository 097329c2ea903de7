"""From what a caller writes to the message that asks for it."""

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypedDict

import msgspec

from pannier.client.line import new_request
from pannier.wire.messages import ChatMessage, Generate, Guide, SamplingParams, Tokenize

Prompt: TypeAlias = str | Sequence[int]
"""Text, or token ids."""

Turn: TypeAlias = ChatMessage | Mapping[str, str]
"""One message of a conversation: {"role": ..., "content": ...}."""


class Params(TypedDict, total=False):
    """How tokens are drawn and when to stop; what is left out is as in `pannier.wire.messages.SamplingParams`."""

    max_tokens: int | None
    min_tokens: int
    n: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    allowed_tokens: Sequence[int] | None
    bad_words: str | Sequence[str]
    seed: int | None
    logprobs: int | None
    prompt_logprobs: int | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    include_stop: bool
    ignore_eos: bool
    guide: Guide | None


class Options(Params, total=False):
    """All that a request may say beside its prompt and the model's name.

    priority: smaller goes first, where the gateway goes by priority; 0 when left out.
    deadline_s: seconds after which the gateway ends the request with an error.
    cache_salt: only requests with the same salt share what the gateway has cached of their prompts.
    traceparent: of the caller's own span, in W3C's form; a gateway that makes traces goes on with that one.
    """

    priority: int
    deadline_s: float | None
    cache_salt: str | None
    traceparent: str | None


def completion_request(prompt: Prompt, model: str | None, options: Options) -> Generate:
    """Ask to continue a prompt. Raises `TypeError` for what is no prompt and no parameter."""
    return _generate(
        model,
        options,
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_tokens=None if isinstance(prompt, str) else tuple(operator.index(token) for token in prompt),
    )


def chat_request(messages: Iterable[Turn], model: str | None, options: Options) -> Generate:
    """Ask for the next turn of a conversation. Raises `TypeError` for what is no message and no parameter."""
    return _generate(model, options, messages=tuple(_chat_message(turn) for turn in messages))


def tokenize_question(text: str | Iterable[Turn], add_special_tokens: bool) -> Tokenize:
    """Ask for the tokens of a text or a conversation. Raises `TypeError` for what is neither."""
    if isinstance(text, str):
        return Tokenize(new_request(), text, None, add_special_tokens)
    return Tokenize(new_request(), None, tuple(_chat_message(turn) for turn in text), add_special_tokens)


def _generate(
    model: str | None,
    options: Options,
    *,
    prompt: str | None = None,
    prompt_tokens: tuple[int, ...] | None = None,
    messages: tuple[ChatMessage, ...] | None = None,
) -> Generate:
    checked = _checked(options)
    params = {name: checked.pop(name) for name in SamplingParams.__struct_fields__ if name in checked}
    return Generate(
        new_request(),
        model,
        prompt,
        prompt_tokens,
        messages,
        msgspec.structs.replace(SamplingParams(), **params),
        **checked,
    )


def _chat_message(turn: Turn) -> ChatMessage:
    if isinstance(turn, ChatMessage):
        return turn
    if isinstance(turn, Mapping) and set(turn) == {"role", "content"} and all(isinstance(turn[k], str) for k in turn):
        return ChatMessage(turn["role"], turn["content"])
    raise TypeError(f"a message is {{'role': str, 'content': str}}, not {turn!r}")


def _checked(options: Options) -> dict[str, Any]:
    """The gateway drops a message of the wrong types unread, so types are checked here."""
    unknown = options.keys() - Options.__annotations__.keys()
    if unknown:
        legal = ", ".join(Options.__annotations__)
        raise TypeError(f"{', '.join(sorted(unknown))} is no parameter; there are {legal}, model and timeout_s")
    try:
        checked = msgspec.convert(options, Options)
    except msgspec.ValidationError as error:
        raise TypeError(f"a parameter has the wrong type: {error}") from error
    return {name: _as_sent(name, value) for name, value in checked.items()}


def _as_sent(name: str, value: Any) -> Any:
    """One string stands for a list of it, and a list is sent as a tuple."""
    if isinstance(value, str) and name in ("stop", "bad_words"):
        return (value,)
    return tuple(value) if isinstance(value, list) else value
