"""The client for asyncio."""

import asyncio
import contextlib
import os
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self, Unpack

from pannier.client.client import CONNECT_TIMEOUT_S, DEFAULT_ENDPOINT
from pannier.client.completion import Completion, join
from pannier.client.errors import TimedOut
from pannier.client.inbox import Inbox, Taken
from pannier.client.line import Line, Question, new_request
from pannier.client.params import (
    Options,
    Prompt,
    Turn,
    chat_request,
    completion_request,
    tokenize_question,
)
from pannier.wire.messages import Delta, Detokenize, GetStatus, Status, Tokens, TokenText


class AsyncClient:
    """Talks to one gateway over one connection, for any number of tasks at once.

    Methods and errors are `Client`'s. A task that is cancelled while it waits cancels its request.
    """

    def __init__(
        self,
        endpoint: str = DEFAULT_ENDPOINT,
        *,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        insecure: bool = False,
        keys: str | os.PathLike[str] | None = None,
    ) -> None:
        self._line = Line(endpoint, connect_timeout_s, insecure, keys)

    async def complete(
        self, prompt: Prompt, *, model: str | None = None, timeout_s: float | None = None, **options: Unpack[Options]
    ) -> Completion:
        """Continue a text, or token ids."""
        async with self.stream(prompt, model=model, timeout_s=timeout_s, **options) as chunks:
            return join([chunk async for chunk in chunks])

    def stream(
        self, prompt: Prompt, *, model: str | None = None, timeout_s: float | None = None, **options: Unpack[Options]
    ) -> "AsyncStream":
        """Continue a text, or token ids, and give the chunks as they come. The request is sent at once."""
        return AsyncStream(self._line, completion_request(prompt, model, options), timeout_s)

    async def chat(
        self,
        messages: Iterable[Turn],
        *,
        model: str | None = None,
        timeout_s: float | None = None,
        **options: Unpack[Options],
    ) -> Completion:
        """The model's turn in a conversation."""
        async with self.chat_stream(messages, model=model, timeout_s=timeout_s, **options) as chunks:
            return join([chunk async for chunk in chunks])

    def chat_stream(
        self,
        messages: Iterable[Turn],
        *,
        model: str | None = None,
        timeout_s: float | None = None,
        **options: Unpack[Options],
    ) -> "AsyncStream":
        """The model's turn in a conversation, in chunks as they come. The request is sent at once."""
        return AsyncStream(self._line, chat_request(messages, model, options), timeout_s)

    async def tokenize(
        self, text: str | Iterable[Turn], *, add_special_tokens: bool = True, timeout_s: float | None = None
    ) -> tuple[int, ...]:
        """Token ids of a text, or of a conversation up to the model's turn."""
        answer = await self._ask(tokenize_question(text, add_special_tokens), timeout_s)
        assert isinstance(answer, Tokens)
        return answer.tokens

    async def detokenize(self, tokens: Iterable[int], *, timeout_s: float | None = None) -> TokenText:
        """The text of token ids, of all together and of each."""
        answer = await self._ask(Detokenize(new_request(), tuple(tokens)), timeout_s)
        assert isinstance(answer, TokenText)
        return answer

    async def status(self, *, timeout_s: float | None = None) -> dict[str, Any]:
        """The whole stack as plain data."""
        answer = await self._ask(GetStatus(new_request()), timeout_s)
        assert isinstance(answer, Status)
        return answer.status

    async def _ask(self, question: Question, timeout_s: float | None) -> Taken:
        """One question with one answer."""
        answers = AsyncAnswers(self._line, question, timeout_s)
        try:
            return await answers.take()
        finally:
            answers.close()

    async def close(self) -> None:
        """End all requests and the connection; again is fine."""
        await asyncio.to_thread(self._line.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()


class AsyncAnswers:
    """What comes back for one request. Closing it, or dropping the last reference, cancels what is unfinished."""

    def __init__(self, line: Line, message: Question, timeout_s: float | None) -> None:
        self._line = line
        self._request = message.request
        self._timeout_s = timeout_s
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()
        self._deadline = None if timeout_s is None else loop.time() + timeout_s
        self._arrived = arrived

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and with it every reader
                loop.call_soon_threadsafe(arrived.set)

        self._inbox = Inbox(wake)
        self._ended = False
        line.ask(message, self._inbox)

    async def take(self) -> Taken:
        """Wait for the next answer. Raises as `Client` says."""
        try:
            async with asyncio.timeout_at(self._deadline):
                while True:
                    self._arrived.clear()
                    answer = self._inbox.take()
                    if answer is not None:
                        return answer
                    await self._arrived.wait()
        except TimeoutError as error:
            raise TimedOut(f"the answer took longer than {self._timeout_s:g} s") from error

    def close(self) -> None:
        """Cancel the request unless it has ended; again is fine."""
        if not self._ended:
            self._ended = True
            self._line.cancel(self._request)

    def __del__(self) -> None:
        if hasattr(self, "_ended"):
            self.close()


class AsyncStream(AsyncAnswers):
    """The chunks of one answer, the last of which has the usage. Leaving it early cancels the request.

    Raises as `Client` says. Only one task may read it.
    """

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        if self._ended:
            raise StopAsyncIteration
        try:
            answer = await self.take()
        except BaseException:
            self.close()
            raise
        assert isinstance(answer, Delta)
        self._ended = answer.usage is not None
        return answer

    async def aclose(self) -> None:
        """As `close`, for `contextlib.aclosing`."""
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()
