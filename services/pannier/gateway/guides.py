"""Structured output: a schema, regular expression or grammar as a constraint on what may be drawn."""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pannier.gateway.allowed_tokens import WORD_BYTES
from pannier.gateway.guide_compiler import Compiler, stuck, wrong
from pannier.gateway.guide_trial import Trial
from pannier.gateway.text import Text
from pannier.scheduler import Rejected
from pannier.scheduler.blocks import Ints
from pannier.wire.messages import Guide

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_CHARACTERS = 256 << 10
MAX_REMEMBERED = 64
"""Compiled guides that are kept: clients send the same schema again and again."""
MAX_BRANCHES = 64
"""Outputs of one request that are followed at the same time; of more, some are read again from their beginning."""
NO_TOKEN = "NoExtensionBias"
"""The library's word for a place where nothing may be drawn."""


class Guides:
    """Compiles guides for one model's tokens, and remembers them. `compile` may be called from several threads."""

    def __init__(self, text: Text, vocab_size: int, end_tokens: Sequence[int]) -> None:
        num_tokens = max(vocab_size, text.num_tokens)  # either may be larger; no mask is wider than the model
        tokenizer_json = text.to_json()
        self._vocab_size = vocab_size
        self._trial = Trial(tokenizer_json, num_tokens, end_tokens)
        self._compiler = Compiler(tokenizer_json, num_tokens, end_tokens)
        self._compiled: OrderedDict[Guide, LLMatcher] = OrderedDict()

    def compile(self, guide: Guide) -> "Guided":
        """The guide as a constraint of one request. Raises `Rejected` with what is wrong with it."""
        remembered = self._compiled.get(guide)
        if remembered is not None:
            with suppress(Rejected):
                return self._begin(guide, remembered)
            # Copies share a lexer: where it has come to a limit over one output, it does nothing for any other.
        return self._begin(guide, self._compile(guide))

    def _compile(self, guide: Guide) -> "LLMatcher":
        if len(guide.text) > MAX_CHARACTERS:
            raise wrong(guide, f"it has {len(guide.text)} characters; at most {MAX_CHARACTERS} are allowed")
        self._trial.run(guide)
        return self._compiler.compile(guide)

    def _begin(self, guide: Guide, compiled: "LLMatcher") -> "Guided":
        """The guide at its beginning, where it must allow something; then it is remembered as the newest."""
        constraint = Guided(guide, compiled.deep_copy(), self._vocab_size)
        constraint.allowed(array("i"))
        self._compiled.pop(guide, None)
        self._compiled[guide] = compiled
        while len(self._compiled) > MAX_REMEMBERED:
            self._compiled.popitem(last=False)
        return constraint


@dataclass
class _Branch:
    """One output, as far as it was followed."""

    matcher: "LLMatcher"
    tokens: list[int]
    mask: bytes | None = None
    """What may come behind these, once it was asked for."""


class Guided:
    """Allows what a guide allows; a `Constraint`. The outputs of one request, which differ, are followed apart."""

    def __init__(self, guide: Guide, matcher: "LLMatcher", vocab_size: int) -> None:
        self._guide = guide
        self._start = matcher
        self._mask_bytes = -(-vocab_size // (8 * WORD_BYTES)) * WORD_BYTES
        self._branches: list[_Branch] = []

    def allowed(self, outputs: Ints) -> bytes:
        """The mask behind these tokens: only the end where the text is complete and nothing else fits.

        Raises `Rejected` where no token spells what must come next, or the library has come to one of its limits.
        """
        branch = self._follow(list(outputs))
        if branch.mask is not None:
            return branch.mask
        mask: bytes = branch.matcher.compute_bitmask()[: self._mask_bytes]
        if branch.matcher.is_error() or not any(mask):  # in an error the library allows the end
            reason = branch.matcher.get_error() or NO_TOKEN
            raise self._dead_end(len(outputs), reason)
        branch.mask = mask
        return mask

    def _dead_end(self, num_tokens: int, reason: str) -> Rejected:
        if reason.startswith(NO_TOKEN):
            reason = "no text that the model's tokens spell fits it" if num_tokens == 0 else "no token fits"
        return stuck(self._guide, num_tokens, reason) if num_tokens else wrong(self._guide, reason)

    def _follow(self, outputs: list[int]) -> _Branch:
        branch = max(
            (each for each in self._branches if outputs[: len(each.tokens)] == each.tokens),
            key=lambda each: len(each.tokens),
            default=None,
        )
        if branch is None:
            branch = _Branch(self._start.deep_copy(), [])
            self._branches = [*self._branches[-(MAX_BRANCHES - 1) :], branch]
        if new := outputs[len(branch.tokens) :]:
            branch.matcher.consume_tokens(new)
            branch.tokens, branch.mask = outputs, None
        return branch
