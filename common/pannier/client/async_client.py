"""The client for asyncio."""

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Iterable
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar, Unpack

from pannier.client.client import CONNECT_TIMEOUT_S, DEFAULT_ENDPOINT, NO_EMBEDDINGS
from pannier.client.completion import Completion, join
from pannier.client.errors import ClientClosed, ClientError, NotServed, TimedOut
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
from pannier.client.retry import is_passing, pauses
from pannier.wire.messages import Delta, Detokenize, GetStatus, Status, Tokens, TokenText

T = TypeVar("T")


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
        retries: int = 0,
    ) -> None:
        self._line = Line(endpoint, connect_timeout_s, insecure, keys)
        self._retries = retries

    async def complete(
        self, prompt: Prompt, *, model: str | None = None, timeout_s: float | None = None, **options: Unpack[Options]
    ) -> Completion:
        """Continue a text, or token ids."""

        async def once(left_s: float | None) -> Completion:
            async with self.stream(prompt, model=model, timeout_s=left_s, **options) as chunks:
                return join([chunk async for chunk in chunks])

        return await self._retried(once, timeout_s)

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
        turns = tuple(messages)

        async def once(left_s: float | None) -> Completion:
            async with self.chat_stream(turns, model=model, timeout_s=left_s, **options) as chunks:
                return join([chunk async for chunk in chunks])

        return await self._retried(once, timeout_s)

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

    async def embeddings(self, *_given: object, **_options: object) -> NoReturn:
        """Refused. Raises `NotServed`."""
        raise NotServed(NO_EMBEDDINGS)

    async def tokenize(
        self, text: str | Iterable[Turn], *, add_special_tokens: bool = True, timeout_s: float | None = None
    ) -> tuple[int, ...]:
        """Token ids of a text, or of a conversation up to the model's turn."""
        answer = await self._ask(lambda: tokenize_question(text, add_special_tokens), timeout_s)
        assert isinstance(answer, Tokens)
        return answer.tokens

    async def detokenize(self, tokens: Iterable[int], *, timeout_s: float | None = None) -> TokenText:
        """The text of token ids, of all together and of each."""
        numbers = tuple(tokens)
        answer = await self._ask(lambda: Detokenize(new_request(), numbers), timeout_s)
        assert isinstance(answer, TokenText)
        return answer

    async def status(self, *, timeout_s: float | None = None) -> dict[str, Any]:
        """The whole stack as plain data."""
        answer = await self._ask(lambda: GetStatus(new_request()), timeout_s)
        assert isinstance(answer, Status)
        return answer.status

    async def _ask(self, question: Callable[[], Question], timeout_s: float | None) -> Taken:
        """One question with one answer; every time that it is asked it has a name of its own."""

        async def once(left_s: float | None) -> Taken:
            answers = AsyncAnswers(self._line, question(), left_s)
            try:
                return await answers.take()
            finally:
                answers.close()

        return await self._retried(once, timeout_s)

    async def _retried(self, once: Callable[[float | None], Awaitable[T]], timeout_s: float | None) -> T:
        """The first answer, of as many tries as are allowed within the time."""
        loop = asyncio.get_running_loop()
        deadline = None if timeout_s is None else loop.time() + timeout_s
        left_s = timeout_s
        for pause_s in pauses(self._retries):
            try:
                return await once(left_s)
            except ClientError as error:
                if not is_passing(error) or (deadline is not None and loop.time() + pause_s >= deadline):
                    raise
            await asyncio.sleep(pause_s)
            left_s = None if deadline is None else deadline - loop.time()
        return await once(left_s)

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
        """Cancel the request unless it has ended, and end who waits for more of it; again is fine."""
        if not self._ended:
            self._cancel()
            self._inbox.put(ClientClosed("the stream is closed"))

    def _cancel(self) -> None:
        self._ended = True
        self._line.cancel(self._request)

    def __del__(self) -> None:
        if hasattr(self, "_ended") and not self._ended:
            self._cancel()  # nobody is left who could wait


class AsyncStream(AsyncAnswers):
    """The chunks of one answer, the last of which has the usage. Leaving it early cancels the request.

    Raises as `Client` says. Only one task may read it; any may close it.
    """

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        if self._ended:
            raise StopAsyncIteration
        try:
            answer = await self.take()
        except BaseException as error:
            if self._ended and isinstance(error, ClientClosed):
                raise StopAsyncIteration from None
            self.close()
            raise
        assert isinstance(answer, Delta)
        self._ended = self._ended or answer.usage is not None
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
