"""Structured output: a schema, regular expression or grammar as a constraint on what may be drawn."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from pannier.gateway.allowed_tokens import WORD_BYTES
from pannier.gateway.text import Text
from pannier.scheduler import Rejected
from pannier.scheduler.blocks import Ints
from pannier.wire.messages import Guide, GuideKind

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_CHARACTERS = 256 << 10
SPACE = r"\n?[ \t]{0,12}"
"""Between the parts of JSON at most: a line and its indentation. A model that may would go on with spaces for ever."""
MAX_REMEMBERED = 64
"""Compiled guides that are kept: clients send the same schema again and again."""
MAX_BRANCHES = 64
"""Outputs of one request that are followed at the same time; of more, some are read again from their beginning."""
log = structlog.get_logger()


class Guides:
    """Compiles guides for one model's tokens, and remembers them. `compile` may be called from several threads."""

    def __init__(self, text: Text, vocab_size: int, end_tokens: Sequence[int]) -> None:
        self._tokenizer_json = text.to_json()
        self._vocab_size = vocab_size
        self._num_tokens = max(vocab_size, text.num_tokens)  # either may be larger; no mask is wider than the model
        self._end_tokens = list(end_tokens)
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[Guide, LLMatcher] = OrderedDict()

    def compile(self, guide: Guide) -> "Guided":
        """The guide as a constraint of one request. Raises `Rejected` with what is wrong with it."""
        from llguidance import LLMatcher

        compiled = self._compiled.get(guide)
        if compiled is not None:
            self._compiled.move_to_end(guide)
        else:
            compiled = LLMatcher(self._tokens(), self._grammar(guide), log_level=0)
            if compiled.is_error():
                raise _wrong(guide, compiled.get_error())
            self._compiled[guide] = compiled
            while len(self._compiled) > MAX_REMEMBERED:
                self._compiled.popitem(last=False)
        return Guided(compiled.deep_copy(), self._vocab_size, self._end_tokens)

    def _grammar(self, guide: Guide) -> str:
        from llguidance import LLMatcher

        if len(guide.text) > MAX_CHARACTERS:
            raise _wrong(guide, f"it has {len(guide.text)} characters; at most {MAX_CHARACTERS} are allowed")
        try:
            match guide.kind:
                case GuideKind.JSON_SCHEMA:
                    grammar = LLMatcher.grammar_from_json_schema(guide.text, defaults={"whitespace_pattern": SPACE})
                case GuideKind.REGEX:
                    grammar = LLMatcher.grammar_from_regex(guide.text)
                case GuideKind.GRAMMAR:
                    grammar = LLMatcher.grammar_from_lark(guide.text)
        except ValueError as error:
            raise _wrong(guide, str(error)) from error
        is_error, said = LLMatcher.validate_grammar_with_warnings(grammar, self._tokens())
        if is_error:
            raise _wrong(guide, said[0])
        return grammar

    def _tokens(self) -> "LLTokenizer":
        """Made for the first guide: a large vocabulary takes a second."""
        from llguidance import LLTokenizer

        if self._tokenizer is None:
            self._tokenizer = LLTokenizer(
                self._tokenizer_json, n_vocab=self._num_tokens, eos_token=self._end_tokens, slices=None
            )
        return self._tokenizer


def _wrong(guide: Guide, reason: str) -> Rejected:
    return Rejected("invalid", "guide", f"the {guide.kind.replace('_', ' ')} can't be used: {' '.join(reason.split())}")


@dataclass
class _Branch:
    """One output, as far as it was followed."""

    matcher: "LLMatcher"
    tokens: list[int]


class Guided:
    """Allows what a guide allows; a `Constraint`. The outputs of one request, which differ, are followed apart."""

    def __init__(self, matcher: "LLMatcher", vocab_size: int, end_tokens: Sequence[int]) -> None:
        self._start = matcher
        self._mask_bytes = -(-vocab_size // (8 * WORD_BYTES)) * WORD_BYTES
        self._end = _mask(end_tokens, self._mask_bytes)
        self._branches: list[_Branch] = []

    def allowed(self, outputs: Ints) -> bytes:
        """The mask behind these tokens."""
        branch = self._follow(list(outputs))
        mask: bytes = branch.matcher.compute_bitmask()[: self._mask_bytes]
        if branch.matcher.is_error() or not any(mask):
            # No token spells what must come next. Nothing to draw would fail the step for all that are in it.
            log.warning("a guide has come to a dead end", tokens=len(outputs), reason=branch.matcher.get_error())
            return self._end
        return mask

    def _follow(self, outputs: list[int]) -> _Branch:
        branch = max(
            (each for each in self._branches if outputs[: len(each.tokens)] == each.tokens),
            key=lambda each: len(each.tokens),
            default=None,
        )
        if branch is None:
            branch = _Branch(self._start.deep_copy(), [])
            self._branches = [*self._branches[-(MAX_BRANCHES - 1) :], branch]
        branch.matcher.consume_tokens(outputs[len(branch.tokens) :])
        branch.tokens = outputs
        return branch


def _mask(tokens: Sequence[int], num_bytes: int) -> bytes:
    mask = bytearray(num_bytes)
    for token in tokens:
        mask[token // 8] |= 1 << token % 8
    return bytes(mask)
