"""From the fields of a request to the options of our client."""

import re
from typing import Any

from pannier.client import Options
from pannier.http.errors import invalid
from pannier.http.guides import guide_of
from pannier.http.requests import ChatRequest, CompletionRequest, SamplingFields, shown

COMPLETION_TOKENS = 16
"""OpenAI's default for completions; a chat goes on for as long as the model's window allows."""
TOKEN_ID = re.compile("-?[0-9]{1,18}")
"""As a key, which JSON has as text: whatever matches is a number that a message can carry."""

_SAME = (
    "n", "temperature", "top_p", "frequency_penalty", "presence_penalty", "seed", "stop", "min_p",
    "repetition_penalty", "stop_token_ids", "ignore_eos", "min_tokens", "prompt_logprobs", "bad_words", "priority",
    "cache_salt",
)  # fmt: skip
_RENAMED = {"include_stop_str_in_output": "include_stop", "allowed_token_ids": "allowed_tokens"}


def completion_options(request: CompletionRequest) -> Options:
    """Of a completion. Raises `ApiError`."""
    options = _options(request)
    options["max_tokens"] = COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
    if request.echo and request.max_tokens == 0:
        options["max_tokens"] = 1  # drawn and left out: the gateway has no request without a draw
    if request.logprobs is not None:
        options["logprobs"] = request.logprobs
        if request.echo:
            options["prompt_logprobs"] = request.logprobs
    return options


def chat_options(request: ChatRequest) -> Options:
    """Of a chat. Raises `ApiError`."""
    options = _options(request)
    most = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
    options["max_tokens"] = most
    if request.top_logprobs is not None and not request.logprobs:
        raise invalid("top_logprobs", "top_logprobs needs logprobs to be true")
    if request.logprobs:
        options["logprobs"] = request.top_logprobs or 0
    return options


def _options(request: SamplingFields) -> Options:
    given: dict[str, Any] = {name: getattr(request, name) for name in _SAME}
    given |= {ours: getattr(request, theirs) for theirs, ours in _RENAMED.items()}
    given["top_k"] = 0 if request.top_k == -1 else request.top_k
    given["logit_bias"] = _bias(request.logit_bias)
    given["guide"] = guide_of(request)
    options: Any = {name: value for name, value in given.items() if value is not None}
    result: Options = options
    return result


def _bias(bias: dict[str, float] | None) -> dict[int, float] | None:
    if bias is None:
        return None
    for token in bias:
        if TOKEN_ID.fullmatch(token) is None:
            raise invalid("logit_bias", f"logit_bias has the key {shown(token)}; keys must be token ids")
    return {int(token): value for token, value in bias.items()}
