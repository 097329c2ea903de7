"""`/v1/chat/completions`: the model's turn in a conversation, whole or in chunks."""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pannier.client import AsyncClient, Delta, Options, TokenLogprob, Usage
from pannier.http.disconnect import unless_disconnected
from pannier.http.generation import Generation
from pannier.http.logprobs import chat_logprobs, tokens_of
from pannier.http.metrics import Metrics
from pannier.http.params import chat_options
from pannier.http.requests import ChatRequest, read
from pannier.http.sse import Events, event_response
from pannier.http.tracing import traceparent_of
from pannier.http.usage import usage_of
from pannier.http.vocabulary import Vocabulary


@dataclass
class Choice:
    """One output as it grows."""

    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None


class Chat:
    """Answers chats through one client of the gateway."""

    def __init__(self, client: AsyncClient, model: str, metrics: Metrics, keep_alive_s: float) -> None:
        self._client = client
        self._model = model
        self._metrics = metrics
        self._keep_alive_s = keep_alive_s
        self._vocabulary = Vocabulary(client)

    async def __call__(self, http: Request) -> Response:
        """The answer. Raises `ApiError`, `ClientError`."""
        request = read(ChatRequest, await http.body())
        options = chat_options(request)
        options["traceparent"] = traceparent_of(http)
        answer = ChatAnswer(self._model, request, self._vocabulary)
        if request.stream:
            return await event_response(self._events(request, options, answer), self._keep_alive_s)
        return await unless_disconnected(http, self._whole(request, options, answer))

    def _begin(self, request: ChatRequest, options: Options) -> Generation:
        turns = [{"role": message.role, "content": message.text} for message in request.messages]
        return Generation([self._client.chat_stream(turns, model=request.model, **options)], self._metrics)

    async def _whole(self, request: ChatRequest, options: Options, answer: "ChatAnswer") -> Response:
        async for _, delta in self._begin(request, options).deltas():
            await answer.take(delta)
        return JSONResponse(answer.whole())

    async def _events(self, request: ChatRequest, options: Options, answer: "ChatAnswer") -> Events:
        generation = self._begin(request, options)
        try:
            async for _, delta in generation.deltas():
                for chunk in await answer.take(delta):
                    yield chunk
            if request.stream_options is not None and request.stream_options.include_usage:
                yield answer.usage_chunk()
        finally:
            generation.close()


class ChatAnswer:
    """What one request is answered, built up from deltas."""

    def __init__(self, model: str, request: ChatRequest, vocabulary: Vocabulary) -> None:
        self._request = request
        self._vocabulary = vocabulary
        self._choices: dict[int, Choice] = {}
        self._usage = Usage(0, 0, 0)
        self._head = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": request.model or model,
        }

    async def take(self, delta: Delta) -> list[dict[str, Any]]:
        """Add what has come; the chunks that a stream says of it."""
        chunks = []
        if delta.index not in self._choices:
            self._choices[delta.index] = Choice()
            chunks.append(self._chunk(delta.index, {"role": "assistant", "content": ""}))
        await self._vocabulary.learn(tokens_of(delta.logprobs))
        choice = self._choices[delta.index]
        choice.text += delta.text
        choice.logprobs += delta.logprobs
        choice.tokens += delta.tokens
        choice.finish_reason = delta.finish_reason
        if delta.text or delta.logprobs:
            logprobs = self._logprobs(delta.logprobs)
            chunks.append(self._chunk(delta.index, {"content": delta.text}, logprobs, delta.tokens))
        if delta.finish_reason is not None:
            chunks.append(self._chunk(delta.index, {}, reason=delta.finish_reason))
        if delta.usage is not None:
            self._usage = delta.usage
        return chunks

    def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        choices = [self._whole_choice(index, choice) for index, choice in sorted(self._choices.items())]
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": usage_of(self._usage)}

    def usage_chunk(self) -> dict[str, Any]:
        """The last chunk of a stream that was asked for it."""
        return {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": usage_of(self._usage)}

    def _whole_choice(self, index: int, choice: Choice) -> dict[str, Any]:
        made: dict[str, Any] = {
            "index": index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": self._logprobs(choice.logprobs),
            "finish_reason": choice.finish_reason,
        }
        if self._request.return_token_ids:
            made["token_ids"] = choice.tokens
        return made

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        return chat_logprobs(logprobs, self._vocabulary) if self._request.logprobs else None

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        tokens: Sequence[int] = (),
        reason: str | None = None,
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        if self._request.return_token_ids and tokens:
            choice["token_ids"] = list(tokens)
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice]}
