"""Stop strings in text that comes piece by piece."""

from collections.abc import Sequence


class StopStrings:
    """Lets text through up to the first stop string, or with `include` up to its end.

    The first is the one that is complete first, and among those that end at one character the longest; so the
    result does not depend on how the text is cut into pieces.
    """

    def __init__(self, strings: Sequence[str], *, include: bool = False) -> None:
        self._strings = tuple(strings)
        self._include = include
        self._held = ""
        self.matched = False

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """Take more text; return what certainly precedes any stop string. Nothing comes after a match.

        A stop string that is complete in text that may not stop is none; one that only begins there is.
        """
        if self.matched:
            return ""
        seen, text = len(self._held), self._held + text
        cut = self._first_match(text, seen) if may_stop else None
        if cut is not None:
            self.matched, self._held = True, ""
            return text[:cut]
        keep = len(text) - self._num_held(text)
        self._held = text[keep:]
        return text[:keep]

    def flush(self) -> str:
        """The text that was held back; nothing comes after it."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str, seen: int) -> int | None:
        """Where to cut: at the stop string that ends first, and not within the `seen` characters."""
        starts = ((text.find(string, max(0, seen + 1 - len(string))), string) for string in self._strings)
        matches = [(start + len(string), start) for start, string in starts if start >= 0]
        if not matches:
            return None
        end, start = min(matches)
        return end if self._include else start

    def _num_held(self, text: str) -> int:
        """Length of the longest end of `text` with which a stop string may begin."""
        return max((_overlap(text, string) for string in self._strings), default=0)


def _overlap(text: str, string: str) -> int:
    longest = min(len(text), len(string) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(string[:length])), 0)
