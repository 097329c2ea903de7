"""The client for ordinary, blocking code."""

import os
import threading
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar, Unpack

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

DEFAULT_ENDPOINT = "tcp://127.0.0.1:5151"
CONNECT_TIMEOUT_S = 5.0
NO_EMBEDDINGS = "Pannier generates text and serves no embeddings; ask a server of an embedding model for them"
T = TypeVar("T")


class Client:
    """Talks to one gateway over one connection; any number of threads may use it at once.

    Every method raises `RequestFailed` when the gateway can't serve the request, `Unreachable` when none answers
    within `connect_timeout_s` or the one that did has gone, `TimedOut` when the whole answer takes longer than
    `timeout_s`, and `ClientClosed`. With `keys`, a folder that has `client.secret` and `gateway.public`, everything is
    encrypted, and only that gateway is talked to. Raises `NetError` for an endpoint that is none, or that other hosts
    can reach unless there are keys or `insecure` allows it, and for keys that can't be read.

    What gives a whole answer asks again up to `retries` times, after pauses, when there was no gateway or no room;
    `timeout_s` is for all of it. Streams are never asked for again.
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

    def complete(
        self, prompt: Prompt, *, model: str | None = None, timeout_s: float | None = None, **options: Unpack[Options]
    ) -> Completion:
        """Continue a text, or token ids."""

        def once(left_s: float | None) -> Completion:
            with self.stream(prompt, model=model, timeout_s=left_s, **options) as chunks:
                return join(list(chunks))

        return self._retried(once, timeout_s)

    def stream(
        self, prompt: Prompt, *, model: str | None = None, timeout_s: float | None = None, **options: Unpack[Options]
    ) -> "Stream":
        """Continue a text, or token ids, and give the chunks as they come. The request is sent at once."""
        return Stream(self._line, completion_request(prompt, model, options), timeout_s)

    def chat(
        self,
        messages: Iterable[Turn],
        *,
        model: str | None = None,
        timeout_s: float | None = None,
        **options: Unpack[Options],
    ) -> Completion:
        """The model's turn in a conversation."""
        turns = tuple(messages)

        def once(left_s: float | None) -> Completion:
            with self.chat_stream(turns, model=model, timeout_s=left_s, **options) as chunks:
                return join(list(chunks))

        return self._retried(once, timeout_s)

    def chat_stream(
        self,
        messages: Iterable[Turn],
        *,
        model: str | None = None,
        timeout_s: float | None = None,
        **options: Unpack[Options],
    ) -> "Stream":
        """The model's turn in a conversation, in chunks as they come. The request is sent at once."""
        return Stream(self._line, chat_request(messages, model, options), timeout_s)

    def embeddings(self, *_given: object, **_options: object) -> NoReturn:
        """Refused. Raises `NotServed`."""
        raise NotServed(NO_EMBEDDINGS)

    def tokenize(
        self, text: str | Iterable[Turn], *, add_special_tokens: bool = True, timeout_s: float | None = None
    ) -> tuple[int, ...]:
        """Token ids of a text, or of a conversation up to the model's turn."""
        answer = self._ask(lambda: tokenize_question(text, add_special_tokens), timeout_s)
        assert isinstance(answer, Tokens)
        return answer.tokens

    def detokenize(self, tokens: Iterable[int], *, timeout_s: float | None = None) -> TokenText:
        """The text of token ids, of all together and of each."""
        numbers = tuple(tokens)
        answer = self._ask(lambda: Detokenize(new_request(), numbers), timeout_s)
        assert isinstance(answer, TokenText)
        return answer

    def status(self, *, timeout_s: float | None = None) -> dict[str, Any]:
        """The whole stack as plain data."""
        answer = self._ask(lambda: GetStatus(new_request()), timeout_s)
        assert isinstance(answer, Status)
        return answer.status

    def _ask(self, question: Callable[[], Question], timeout_s: float | None) -> Taken:
        """One question with one answer; every time that it is asked it has a name of its own."""

        def once(left_s: float | None) -> Taken:
            answers = Answers(self._line, question(), left_s)
            try:
                return answers.take()
            finally:
                answers.close()

        return self._retried(once, timeout_s)

    def _retried(self, once: Callable[[float | None], T], timeout_s: float | None) -> T:
        """The first answer, of as many tries as are allowed within the time."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        left_s = timeout_s
        for pause_s in pauses(self._retries):
            try:
                return once(left_s)
            except ClientError as error:
                if not is_passing(error) or (deadline is not None and time.monotonic() + pause_s >= deadline):
                    raise
            time.sleep(pause_s)
            left_s = None if deadline is None else deadline - time.monotonic()
        return once(left_s)

    def close(self) -> None:
        """End all requests and the connection; again is fine."""
        self._line.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class Answers:
    """What comes back for one request. Closing it, or dropping the last reference, cancels what is unfinished."""

    def __init__(self, line: Line, message: Question, timeout_s: float | None) -> None:
        self._line = line
        self._request = message.request
        self._timeout_s = timeout_s
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._unread = threading.Semaphore(0)
        self._inbox = Inbox(self._unread.release)
        self._ended = False
        line.ask(message, self._inbox)

    def take(self) -> Taken:
        """Wait for the next answer. Raises as `Client` says."""
        left_s = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        if not self._unread.acquire(timeout=left_s):
            raise TimedOut(f"the answer took longer than {self._timeout_s:g} s")
        answer = self._inbox.take()
        assert answer is not None
        return answer

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


class Stream(Answers):
    """The chunks of one answer, the last of which has the usage. Leaving it early cancels the request.

    Raises as `Client` says. Only one thread may read it; any may close it.
    """

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Delta:
        if self._ended:
            raise StopIteration
        try:
            answer = self.take()
        except BaseException as error:
            if self._ended and isinstance(error, ClientClosed):
                raise StopIteration from None
            self.close()
            raise
        assert isinstance(answer, Delta)
        self._ended = self._ended or answer.usage is not None
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
