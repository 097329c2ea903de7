"""What a client sees of one output: text, and with it the tokens that it comes from."""

from collections import deque
from collections.abc import Sequence
from itertools import takewhile

import msgspec

from pannier.gateway.detokenize import IncrementalDetokenizer
from pannier.gateway.stop_strings import StopStrings
from pannier.wire.messages import Drawn


class Released(msgspec.Struct, frozen=True):
    """New text and the tokens that go out with it, in order. One is made for every token, so it is a cheap struct."""

    text: str = ""
    drawn: tuple[Drawn, ...] = ()

    def __add__(self, later: "Released") -> "Released":
        return Released(self.text + later.text, self.drawn + later.drawn)


class OutputText:
    """Turns drawn tokens into text up to a stop string. Without a detokenizer there is no text.

    A token goes out with the first character at or after the place where its text begins; one whose text would all
    lie behind the cut never does. Where no stop string can cut, no token waits. With `include_stop` the stop string,
    or the text of the stop token, is part of the text. Stop strings that the first `min_tokens` tokens complete are
    text like any other.
    """

    def __init__(
        self,
        detokenizer: IncrementalDetokenizer | None,
        stop: Sequence[str] = (),
        *,
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        if stop and detokenizer is None:
            raise ValueError("stop strings need a tokenizer")
        self._detokenizer = detokenizer
        self._stop = StopStrings(stop, include=include_stop) if stop else None
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._waiting: deque[tuple[int, Drawn]] = deque()  # where the token's text begins, in characters
        self._num_pushed = 0
        self._num_read = 0  # characters that the detokenizer gave
        self._num_shown = 0  # characters that were released

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found; tokens after it are not part of the output."""
        return self._stop is not None and self._stop.matched

    def push(self, drawn: Drawn, *, is_stop_token: bool = False) -> Released:
        """Take the next token, which may be the one that ends the output; return what can be shown now."""
        text = ""
        if self._detokenizer is not None and (self._include_stop or not is_stop_token):
            text = self._detokenizer.push(drawn.token)
        if self._stop is None:
            return Released(text, (drawn,))
        self._waiting.append((self._num_read, drawn))
        self._num_pushed += 1
        return self._release(text, self._stop)

    def finish(self) -> Released:
        """No more tokens: everything that was held back, which may still hold a stop string."""
        text = self._detokenizer.flush() if self._detokenizer else ""
        if self._stop is None:
            return Released(text)
        released = self._release(text, self._stop)
        if self.stopped:
            return released
        return released + Released(self._stop.flush(), self._take(len(self._waiting)))

    def _release(self, text: str, stop: StopStrings) -> Released:
        self._num_read += len(text)
        shown = stop.push(text, may_stop=self._num_pushed > self._min_tokens)
        self._num_shown += len(shown)
        num_begun = sum(1 for _ in takewhile(lambda waiting: waiting[0] < self._num_shown, self._waiting))
        return Released(shown, self._take(num_begun))

    def _take(self, count: int) -> tuple[Drawn, ...]:
        return tuple(self._waiting.popleft()[1] for _ in range(count))
