"""From token ids to text while they come, one at a time."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"
"""What a decoder writes for bytes that are no character, or not one yet."""

PROMPT_TAIL = 8
"""Tokens of the prompt that fix how the output begins: more than the 4 bytes of the longest character."""


class Pieces:
    """A tokenizer's tokens as pieces of text. Special and unknown tokens, and those in `silent`, have none."""

    def __init__(self, tokenizer: "Tokenizer", silent: Iterable[int] = ()) -> None:
        self._tokenizer = tokenizer
        special = (token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special)
        self._with_text = frozenset(tokenizer.get_vocab().values()).difference(special, silent)
        self._bytes = _byte_tokens(tokenizer)
        self._lengths: dict[int, int] = {}
        self._byte_of = _byte_alphabet() if _is_byte_level(tokenizer) else None
        self._anchor = min(self._with_text - self._bytes, default=0)

    def has_text(self, token: int) -> bool:
        """Whether the token can add to the text. A model's vocabulary may be larger than its tokenizer's."""
        return token in self._with_text

    def is_byte(self, token: int) -> bool:
        """Whether the token is one raw byte, whose text depends on all bytes next to it."""
        return token in self._bytes

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens that all have text."""
        return self._tokenizer.decode(tokens, skip_special_tokens=False)

    def piece(self, token: int) -> bytes:
        """The bytes that a token stands for wherever it stands; a special one's name."""
        name = self._tokenizer.id_to_token(token)
        if name is None:
            return b""
        if self.is_byte(token):
            return bytes([int(name[3:5], 16)])
        if not self.has_text(token):
            return name.encode()
        if self._byte_of is not None and all(character in self._byte_of for character in name):
            return bytes(self._byte_of[character] for character in name)
        # A decoder may drop the space before its first token, so this one is decoded behind another.
        before = self.decode([self._anchor])
        return self.decode([self._anchor, token]).removeprefix(before).encode()

    def length(self, tokens: Sequence[int]) -> int:
        """Characters of `decode(tokens)`. That of one token, which is asked for again and again, is remembered."""
        if len(tokens) != 1:
            return len(self.decode(tokens))
        (token,) = tokens
        length = self._lengths.get(token)
        if length is None:
            length = self._lengths[token] = len(self.decode(tokens))
        return length

    def tail(self, prompt: Sequence[int]) -> list[int]:
        """The prompt's last tokens with text, never from the middle of a run of byte tokens."""
        tokens: list[int] = []
        for token in reversed(prompt):
            if len(tokens) >= PROMPT_TAIL and not self.is_byte(tokens[-1]):
                break
            if self.has_text(token):
                tokens.append(token)
        return tokens[::-1]


class IncrementalDetokenizer:
    """The text of one request's output, as far as no later token can change it.

    What `push` and `flush` return, joined, is what decoding the prompt with the whole output adds to the decoded
    prompt. A character that the prompt leaves unfinished belongs to the output.

    Decoders treat their first token differently (a leading space is dropped), so the tokens since the last known
    boundary are always decoded behind the tokens before it.
    """

    def __init__(self, pieces: Pieces, prompt: Sequence[int] = ()) -> None:
        self._pieces = pieces
        self._context = pieces.tail(prompt)
        self._pending: list[int] = []
        self._shown = len(pieces.decode(self._context).rstrip(REPLACEMENT))  # characters of context and pending

    def push(self, token: int) -> str:
        """Take the next token; return the text that is now certain."""
        if not self._pieces.has_text(token):
            return ""
        self._pending.append(token)
        text = self._pieces.decode(self._context + self._pending)
        certain = self._num_certain(text)
        delta = text[self._shown : certain]
        if delta and certain == len(text):
            self._move_boundary()
        else:
            self._shown += len(delta)
        return delta

    def flush(self) -> str:
        """The text that was held back; nothing comes after it."""
        text = self._pieces.decode(self._context + self._pending)
        delta = text[self._shown :]
        self._shown += len(delta)
        return delta

    def _num_certain(self, text: str) -> int:
        # One bad byte spoils a whole run of byte tokens, so a run is certain when it has ended. Other decoders
        # write one replacement for the last bytes while these may still become a character.
        if self._pieces.is_byte(self._pending[-1]):
            return self._shown
        return len(text.removesuffix(REPLACEMENT))

    def _move_boundary(self) -> None:
        self._context, self._pending = self._pending, []
        self._shown = self._pieces.length(self._context)


def _is_byte_level(tokenizer: "Tokenizer") -> bool:
    """Whether tokens are spelt in characters that stand for bytes: Ġ (U+0120) for a space."""
    return tokenizer.decoder is not None and tokenizer.decoder.decode(["a", "Ġ", "b"]) == "a b"


def _byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in byte-level tokens: itself if it can be seen, else one from 256 on."""
    seen = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    unseen = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(256 + i): byte for i, byte in enumerate(unseen)}


def _byte_tokens(tokenizer: "Tokenizer") -> frozenset[int]:
    """Tokens of the form <0xE2> if this tokenizer's decoder reads them as bytes."""
    if tokenizer.decoder is None or tokenizer.decoder.decode(["<0x41>"]) != "A":
        return frozenset()
    tokens = (tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
    return frozenset(token for token in tokens if token is not None)
