"""From what a caller writes to the message that asks for it."""

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias, TypedDict

import msgspec

from pannier.client.line import new_request
from pannier.wire.messages import ChatMessage, Generate, SamplingParams

Prompt: TypeAlias = str | Sequence[int]
"""Text, or token ids."""

Turn: TypeAlias = ChatMessage | Mapping[str, str]
"""One message of a conversation: {"role": ..., "content": ...}."""


class Params(TypedDict, total=False):
    """How tokens are drawn and when to stop; what is left out is as in `pannier.wire.messages.SamplingParams`."""

    max_tokens: int | None
    temperature: float
    seed: int | None
    logprobs: int | None
    stop: str | Sequence[str]
    ignore_eos: bool


def completion_request(prompt: Prompt, model: str | None, params: Params) -> Generate:
    """Ask to continue a prompt. Raises `TypeError` for what is no prompt and no parameter."""
    return _generate(
        model,
        params,
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_tokens=None if isinstance(prompt, str) else tuple(operator.index(token) for token in prompt),
    )


def chat_request(messages: Iterable[Turn], model: str | None, params: Params) -> Generate:
    """Ask for the next turn of a conversation. Raises `TypeError` for what is no message and no parameter."""
    return _generate(model, params, messages=tuple(_chat_message(turn) for turn in messages))


def _generate(
    model: str | None,
    params: Params,
    *,
    prompt: str | None = None,
    prompt_tokens: tuple[int, ...] | None = None,
    messages: tuple[ChatMessage, ...] | None = None,
) -> Generate:
    return Generate(new_request(), model, prompt, prompt_tokens, messages, _sampling_params(params))


def _chat_message(turn: Turn) -> ChatMessage:
    if isinstance(turn, ChatMessage):
        return turn
    if isinstance(turn, Mapping) and set(turn) == {"role", "content"} and all(isinstance(turn[k], str) for k in turn):
        return ChatMessage(turn["role"], turn["content"])
    raise TypeError(f"a message is {{'role': str, 'content': str}}, not {turn!r}")


def _sampling_params(params: Params) -> SamplingParams:
    """The gateway drops a message of the wrong types unread, so types are checked here."""
    unknown = params.keys() - set(SamplingParams.__struct_fields__)
    if unknown:
        legal = ", ".join(SamplingParams.__struct_fields__)
        raise TypeError(f"{', '.join(sorted(unknown))} is no parameter; there are {legal}, model and timeout_s")
    try:
        checked = msgspec.convert(params, Params)
    except msgspec.ValidationError as error:
        raise TypeError(f"a parameter has the wrong type: {error}") from error
    stop = checked.get("stop", ())
    values = {**checked, "stop": (stop,) if isinstance(stop, str) else tuple(stop)}
    return msgspec.structs.replace(SamplingParams(), **values)
