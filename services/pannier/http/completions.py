"""`/v1/completions`: texts continued, whole or in chunks."""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pannier.client import AsyncClient, Delta, Options, Usage
from pannier.http.disconnect import unless_disconnected
from pannier.http.errors import invalid
from pannier.http.generation import Generation
from pannier.http.logprobs import CompletionLogprobs, joined, tokens_of
from pannier.http.metrics import Metrics
from pannier.http.params import completion_options
from pannier.http.requests import CompletionRequest, read
from pannier.http.sse import Events, event_response
from pannier.http.tracing import traceparent_of
from pannier.http.usage import usage_of
from pannier.http.vocabulary import Vocabulary

MAX_PROMPTS = 256


@dataclass(frozen=True)
class Prompt:
    """One prompt of a request: what is sent, and what is repeated if the request asks for an echo."""

    sent: str | Sequence[int]
    echo: str = ""
    first_token: int | None = None
    """Of an echo with log-probabilities."""


@dataclass
class Choice:
    """One output as it grows."""

    index: int
    logprobs: CompletionLogprobs
    text: str = ""
    parts: list[dict[str, Any]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None


class Completions:
    """Answers completions through one client of the gateway."""

    def __init__(self, client: AsyncClient, model: str, metrics: Metrics, keep_alive_s: float) -> None:
        self._client = client
        self._model = model
        self._metrics = metrics
        self._keep_alive_s = keep_alive_s
        self._vocabulary = Vocabulary(client)

    async def __call__(self, http: Request) -> Response:
        """The answer. Raises `ApiError`, `ClientError`."""
        request = read(CompletionRequest, await http.body())
        answer = Answer(self._model, request, self._vocabulary)
        options = completion_options(request)
        options["traceparent"] = traceparent_of(http)
        if request.stream:
            return await event_response(self._events(request, options, answer), self._keep_alive_s)
        return await unless_disconnected(http, self._whole(request, options, answer))

    async def _whole(self, request: CompletionRequest, options: Options, answer: "Answer") -> Response:
        generation = await self._begin(request, options, answer)
        async for number, delta in generation.deltas():
            await answer.take(number, delta)
        return JSONResponse(answer.whole())

    async def _events(self, request: CompletionRequest, options: Options, answer: "Answer") -> Events:
        generation = await self._begin(request, options, answer)
        try:
            async for number, delta in generation.deltas():
                if (chunk := await answer.take(number, delta)) is not None:
                    yield chunk
            if request.stream_options is not None and request.stream_options.include_usage:
                yield answer.usage_chunk()
        finally:
            generation.close()

    async def _begin(self, request: CompletionRequest, options: Options, answer: "Answer") -> Generation:
        answer.prompts = [await self._prompt(request, prompt) for prompt in _prompts(request)]
        streams = [self._client.stream(prompt.sent, model=request.model, **options) for prompt in answer.prompts]
        return Generation(streams, self._metrics)

    async def _prompt(self, request: CompletionRequest, given: str | list[int]) -> Prompt:
        needs_tokens = request.add_special_tokens is False or (request.echo and request.logprobs is not None)
        sent: str | Sequence[int] = given
        if isinstance(given, str) and needs_tokens:
            sent = await self._client.tokenize(given, add_special_tokens=request.add_special_tokens is not False)
        if not request.echo:
            return Prompt(sent)
        echo = given if isinstance(given, str) else (await self._client.detokenize(given)).text
        first = None if request.logprobs is None or not sent or isinstance(sent, str) else sent[0]
        if first is not None:
            await self._vocabulary.learn((first,))
        return Prompt(sent, echo, first)


def _prompts(request: CompletionRequest) -> list[str | list[int]]:
    """A list of numbers is one prompt, any other list is several."""
    given = request.prompt
    if isinstance(given, str):
        return [given]
    several: list[str | list[int]] = [each for each in given if not isinstance(each, int)]
    if given and not several:
        return [[each for each in given if isinstance(each, int)]]
    if not 1 <= len(several) <= MAX_PROMPTS:
        raise invalid("prompt", f"prompt has {len(several)} prompts; 1 to {MAX_PROMPTS} are allowed")
    return several


class Answer:
    """What one request is answered, built up from deltas."""

    def __init__(self, model: str, request: CompletionRequest, vocabulary: Vocabulary) -> None:
        self.prompts: list[Prompt] = []
        self._head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": request.model or model,
        }
        self._request = request
        self._vocabulary = vocabulary
        self._samples = request.n or 1
        self._choices: dict[int, Choice] = {}
        self._usage = Usage(0, 0, 0)
        self._draws = not (request.echo and request.max_tokens == 0)
        self._prompt_logprobs: dict[int, list[dict[str, Any] | None]] = {}

    async def take(self, number: int, delta: Delta) -> dict[str, Any] | None:
        """Add what has come for prompt `number`; the chunk that a stream says, if there is anything to say."""
        index = number * self._samples + delta.index
        is_new = index not in self._choices
        choice = self._choices.setdefault(index, Choice(index, CompletionLogprobs(self._vocabulary)))
        await self._vocabulary.learn(tokens_of([*delta.logprobs, *delta.prompt_logprobs]))
        prompt = self.prompts[number]
        text = (prompt.echo if is_new else "") + (delta.text if self._draws else "")
        logprobs = self._logprobs(choice, prompt, delta, is_new=is_new)
        choice.text += text
        choice.tokens += delta.tokens if self._draws else ()
        choice.parts += [logprobs] if logprobs is not None else []
        choice.finish_reason = delta.finish_reason
        self._note_prompt_logprobs(index, delta)
        if delta.usage is not None:
            self._add(delta.usage)
        if not text and logprobs is None and delta.finish_reason is None:
            return None
        return {**self._head, "choices": [self._choice(choice, text, logprobs, delta.tokens)]}

    def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        choices = [
            self._choice(choice, choice.text, joined(choice.parts) if choice.parts else None, choice.tokens)
            for _, choice in sorted(self._choices.items())
        ]
        return {**self._head, "choices": choices, "usage": usage_of(self._usage)}

    def usage_chunk(self) -> dict[str, Any]:
        """The last chunk of a stream that was asked for it."""
        return {**self._head, "choices": [], "usage": usage_of(self._usage)}

    def _choice(
        self, choice: Choice, text: str, logprobs: dict[str, Any] | None, tokens: Sequence[int]
    ) -> dict[str, Any]:
        made: dict[str, Any] = {
            "index": choice.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
            "stop_reason": None,
        }
        if self._request.return_token_ids:
            made["token_ids"] = list(tokens)
        if choice.index in self._prompt_logprobs:
            made["prompt_logprobs"] = self._prompt_logprobs[choice.index]
        return made

    def _logprobs(self, choice: Choice, prompt: Prompt, delta: Delta, *, is_new: bool) -> dict[str, Any] | None:
        if self._request.logprobs is None:
            return None
        parts = []
        if is_new and prompt.first_token is not None:
            parts.append(choice.logprobs.first(prompt.first_token))
        if self._request.echo and delta.prompt_logprobs:
            parts.append(choice.logprobs.next(delta.prompt_logprobs))
        if delta.logprobs and self._draws:
            parts.append(choice.logprobs.next(delta.logprobs))
        return joined(parts) if parts else None

    def _note_prompt_logprobs(self, index: int, delta: Delta) -> None:
        """In vLLM's form: nothing for the first token, then each token with the most likely in its place."""
        if self._request.prompt_logprobs is None or not delta.prompt_logprobs:
            return
        noted = self._prompt_logprobs.setdefault(index, [None])
        for each in delta.prompt_logprobs:
            likely = {each.token: each.logprob} | {top.token: top.logprob for top in each.top}
            noted.append(
                {
                    str(token): {"logprob": logprob, "decoded_token": self._vocabulary.text(token)}
                    for token, logprob in likely.items()
                }
            )

    def _add(self, usage: Usage) -> None:
        drawn = usage.completion_tokens if self._draws else 0
        self._usage = Usage(
            self._usage.prompt_tokens + usage.prompt_tokens,
            self._usage.cached_tokens + usage.cached_tokens,
            self._usage.completion_tokens + drawn,
        )
