"""A list of tokens as a constraint: the simplest thing that says what may come next, the same at every place."""

from collections.abc import Iterable

from pannier.scheduler.blocks import Ints

WORD_BYTES = 4


class AllowedTokens:
    """Allows these tokens and no others; a `Constraint`."""

    def __init__(self, tokens: Iterable[int], vocab_size: int) -> None:
        mask = bytearray(-(-vocab_size // (8 * WORD_BYTES)) * WORD_BYTES)
        for token in tokens:
            mask[token // 8] |= 1 << token % 8
        self._mask = bytes(mask)

    def allowed(self, outputs: Ints) -> bytes:  # noqa: ARG002
        """The mask, whatever came before."""
        return self._mask
