"""Text to tokens and back for whoever asks, beside the requests that generate."""

import asyncio
from typing import TypeAlias

from pannier.gateway.text import Text
from pannier.runtime.service import in_thread
from pannier.scheduler import Rejected
from pannier.wire import messages as m

Question: TypeAlias = m.Tokenize | m.Detokenize
Answer: TypeAlias = m.Tokens | m.TokenText | m.Failed
MAX_CHARACTERS = 4 << 20
MAX_TOKENS = 1 << 20
MAX_AT_ONCE = 4
"""Questions that threads work on; they share the cores with the steps."""
LONG = 4096
"""Characters or tokens above which a thread answers."""


class TokenText:
    """Answers questions about one model's tokens."""

    def __init__(self, text: Text | None) -> None:
        self._text = text
        self._free = asyncio.Semaphore(MAX_AT_ONCE)

    async def answer(self, question: Question) -> Answer:
        """Of any length up to the limits; what is wrong with it is an answer too."""
        try:
            if self._size(question) <= LONG:
                return self._answer(question)
            async with self._free:
                return await in_thread(self._answer, question)
        except Rejected as rejected:
            return m.Failed(question.request, rejected.code, rejected.param, rejected.reason)

    def _size(self, question: Question) -> int:
        if isinstance(question, m.Detokenize):
            if len(question.tokens) > MAX_TOKENS:
                raise Rejected("invalid", "tokens", f"{len(question.tokens)} tokens; at most {MAX_TOKENS} are allowed")
            return len(question.tokens)
        if (question.text is None) == (question.messages is None):
            raise Rejected("invalid", "text", "exactly one of text and messages must be given")
        size = len(question.text or "") + sum(len(turn.content) for turn in question.messages or ())
        if size > MAX_CHARACTERS:
            raise Rejected("invalid", "text", f"{size} characters; at most {MAX_CHARACTERS} are allowed")
        return size

    def _answer(self, question: Question) -> Answer:
        if self._text is None:
            raise Rejected("invalid", "text", "this model has no tokenizer; it takes and gives token ids")
        if isinstance(question, m.Detokenize):
            self._check(question.tokens)
            pieces = tuple(self._text.piece(token) for token in question.tokens)
            return m.TokenText(question.request, self._text.decode(question.tokens), pieces)
        if question.messages is not None:
            return m.Tokens(question.request, self._text.encode_chat(question.messages))
        assert question.text is not None
        encode = self._text.encode if question.add_special_tokens else self._text.encode_bare
        return m.Tokens(question.request, encode(question.text))

    def _check(self, tokens: tuple[int, ...]) -> None:
        for token in tokens:
            if not 0 <= token < 1 << 31:
                raise Rejected("invalid", "tokens", f"tokens holds {token}, which is no token")
