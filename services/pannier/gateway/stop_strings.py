"""Stop strings in text that comes piece by piece."""

from collections.abc import Sequence


class StopStrings:
    """Lets text through up to the first stop string.

    The first is the one that is complete first, and among those that end at one character the longest; so the
    result does not depend on how the text is cut into pieces.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._held = ""
        self.matched = False

    def push(self, text: str) -> str:
        """Take more text; return what certainly precedes any stop string. Nothing comes after a match."""
        if self.matched:
            return ""
        text = self._held + text
        cut = self._first_match(text)
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

    def _first_match(self, text: str) -> int | None:
        """Where the stop string begins that ends first."""
        starts = ((text.find(string), string) for string in self._strings)
        matches = [(start + len(string), start) for start, string in starts if start >= 0]
        return min(matches)[1] if matches else None

    def _num_held(self, text: str) -> int:
        """Length of the longest end of `text` with which a stop string may begin."""
        return max((_overlap(text, string) for string in self._strings), default=0)


def _overlap(text: str, string: str) -> int:
    longest = min(len(text), len(string) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(string[:length])), 0)
