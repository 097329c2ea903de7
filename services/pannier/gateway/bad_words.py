"""Words that an output must not hold, as the tokens that would spell them."""

from collections.abc import Callable, Sequence

from pannier.gateway.legal_params import require

Encode = Callable[[str], tuple[int, ...]]
"""From text to tokens, without special ones around them."""


def spell(words: Sequence[str], encode: Encode) -> tuple[tuple[int, ...], ...]:
    """Every word as it may begin a text, and as it stands behind another. Raises `Rejected` for one without tokens.

    Both are needed: in most vocabularies a word's first token is another one behind a space.
    """
    sequences: dict[tuple[int, ...], None] = {}  # in order, each once
    for word in words:
        bare = word.lstrip()
        spelled = [tokens for tokens in (encode(bare), encode(" " + bare)) if tokens] if bare else []
        require(bool(spelled), "bad_words", f"bad_words holds {word!r}, which this model has no tokens for")
        sequences.update(dict.fromkeys(spelled))
    return tuple(sequences)
