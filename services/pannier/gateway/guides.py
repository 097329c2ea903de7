"""Structured output: a schema, regular expression or grammar as a constraint on what may be drawn."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from pannier.gateway.allowed_tokens import WORD_BYTES
from pannier.gateway.guide_compiler import Compiler, shown, wrong
from pannier.gateway.guide_trial import Trial
from pannier.gateway.text import Text
from pannier.scheduler.blocks import Ints
from pannier.wire.messages import Guide

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_CHARACTERS = 256 << 10
MAX_REMEMBERED = 64
"""Compiled guides that are kept: clients send the same schema again and again."""
MAX_BRANCHES = 64
"""Outputs of one request that are followed at the same time; of more, some are read again from their beginning."""
log = structlog.get_logger()


class Guides:
    """Compiles guides for one model's tokens, and remembers them. `compile` may be called from several threads."""

    def __init__(self, text: Text, vocab_size: int, end_tokens: Sequence[int]) -> None:
        num_tokens = max(vocab_size, text.num_tokens)  # either may be larger; no mask is wider than the model
        tokenizer_json = text.to_json()
        self._vocab_size = vocab_size
        self._end_tokens = list(end_tokens)
        self._trial = Trial(tokenizer_json, num_tokens, end_tokens)
        self._compiler = Compiler(tokenizer_json, num_tokens, end_tokens)
        self._compiled: OrderedDict[Guide, LLMatcher] = OrderedDict()

    def compile(self, guide: Guide) -> "Guided":
        """The guide as a constraint of one request. Raises `Rejected` with what is wrong with it."""
        compiled = self._compiled.get(guide)
        if compiled is not None:
            self._compiled.move_to_end(guide)
        else:
            if len(guide.text) > MAX_CHARACTERS:
                raise wrong(guide, f"it has {len(guide.text)} characters; at most {MAX_CHARACTERS} are allowed")
            self._trial.run(guide)
            compiled = self._compiler.compile(guide)
            self._compiled[guide] = compiled
            while len(self._compiled) > MAX_REMEMBERED:
                self._compiled.popitem(last=False)
        return Guided(compiled.deep_copy(), self._vocab_size, self._end_tokens)


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
            reason = shown(branch.matcher.get_error() or "nothing fits")
            log.warning("a guide has come to a dead end", tokens=len(outputs), reason=reason)
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
