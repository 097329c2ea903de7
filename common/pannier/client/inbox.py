"""Where the answers to one request wait for their reader."""

from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from pannier.client.errors import ClientError, ReaderTooSlow, RequestFailed
from pannier.wire.messages import Delta, Failed, Status, Tokens, TokenText

Taken: TypeAlias = Delta | Status | Tokens | TokenText
Answer: TypeAlias = Taken | Failed | ClientError

MAX_UNREAD = 65_536
"""Chunks that may wait; a reader that is further behind isn't reading."""


class Inbox:
    """Filled by the connection's thread, which calls `wake` for each answer; emptied by one reader."""

    def __init__(self, wake: Callable[[], None], max_unread: int = MAX_UNREAD) -> None:
        self._wake = wake
        self._max_unread = max_unread
        self._answers: deque[Answer] = deque()  # append and popleft are atomic

    def put(self, answer: Answer) -> bool:
        """Take an answer; False when the reader is too far behind, who then finds `ReaderTooSlow` as the last."""
        fits = len(self._answers) < self._max_unread
        self._answers.append(answer if fits else ReaderTooSlow(f"{self._max_unread} chunks of a stream were unread"))
        self._wake()
        return fits

    def take(self) -> Taken | None:
        """The next answer, None when there is none yet. Raises `ClientError` where that is the answer."""
        if not self._answers:
            return None
        answer = self._answers.popleft()
        if isinstance(answer, Failed):
            raise RequestFailed(answer.code, answer.param, answer.reason)
        if isinstance(answer, ClientError):
            raise answer
        return answer
