"""From the text of a guide to a matcher, for one model's tokens. The native library behind it can be brought to its end
by a text of a few KB: see `pannier.gateway.guide_trial`.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pannier.scheduler import Rejected
from pannier.wire.messages import Guide, GuideKind

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

SPACE = r"\n?[ \t]{0,12}"
"""Between the parts of JSON at most: a line and its indentation. A model that may would go on with spaces for ever."""
MAX_SHOWN = 300
"""Characters of the library's words that are repeated; it likes to repeat all that it was given."""


class Compiler:
    """Compiles guides for one tokenizer."""

    def __init__(self, tokenizer_json: str, num_tokens: int, end_tokens: Sequence[int]) -> None:
        self._tokenizer_json = tokenizer_json
        self._num_tokens = num_tokens
        self._end_tokens = list(end_tokens)
        self._tokenizer: LLTokenizer | None = None

    def compile(self, guide: Guide) -> "LLMatcher":
        """A matcher at its beginning. Raises `Rejected` with what is wrong with the guide."""
        from llguidance import LLMatcher

        compiled = LLMatcher(self._tokens(), self._grammar(guide), log_level=0)
        if compiled.is_error():
            raise wrong(guide, compiled.get_error())
        return compiled

    def warm_up(self) -> None:
        """Read the tokenizer now, which a large vocabulary makes take a second."""
        self._tokens()

    def _grammar(self, guide: Guide) -> str:
        from llguidance import LLMatcher

        try:
            match guide.kind:
                case GuideKind.JSON_SCHEMA:
                    grammar = LLMatcher.grammar_from_json_schema(guide.text, defaults={"whitespace_pattern": SPACE})
                case GuideKind.REGEX:
                    grammar = LLMatcher.grammar_from_regex(guide.text)
                case GuideKind.GRAMMAR:
                    grammar = LLMatcher.grammar_from_lark(guide.text)
        except ValueError as error:
            raise wrong(guide, str(error)) from error
        is_error, said = LLMatcher.validate_grammar_with_warnings(grammar, self._tokens())
        if is_error:
            raise wrong(guide, said[0])
        return grammar

    def _tokens(self) -> "LLTokenizer":
        """Made for the first guide."""
        from llguidance import LLTokenizer

        if self._tokenizer is None:
            self._tokenizer = LLTokenizer(
                self._tokenizer_json, n_vocab=self._num_tokens, eos_token=self._end_tokens, slices=None
            )
        return self._tokenizer


def wrong(guide: Guide, reason: str) -> Rejected:
    """A guide that can't be used, and why."""
    return Rejected("invalid", "guide", f"the {guide.kind.replace('_', ' ')} can't be used: {shown(reason)}")


def stuck(guide: Guide, num_tokens: int, reason: str) -> Rejected:
    """A guide that can't be followed any further, and why."""
    what = f"the {guide.kind.replace('_', ' ')} can't be followed behind {num_tokens} tokens"
    return Rejected("invalid", "guide", f"{what}: {shown(reason)}")


def shown(reason: str) -> str:
    """What the library says, on one line and not at any length."""
    line = " ".join(reason.partition("\n<")[0].split())  # behind that stands its state, and the whole guide
    return line if len(line) <= MAX_SHOWN else line[:MAX_SHOWN] + "..."
