"""The text of single tokens, for log-probabilities: asked of the gateway once, then remembered."""

from collections.abc import Iterable

from pannier.client import AsyncClient


class Vocabulary:
    """Bytes of the tokens that were needed so far."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._pieces: dict[int, bytes] = {}

    async def learn(self, tokens: Iterable[int]) -> None:
        """Make sure that these are known. Raises `ClientError`."""
        unknown = sorted(set(tokens) - self._pieces.keys())
        if unknown:
            answer = await self._client.detokenize(unknown)
            self._pieces |= zip(unknown, answer.pieces, strict=True)

    def piece(self, token: int) -> bytes:
        """Bytes of a token that was learnt."""
        return self._pieces[token]

    def text(self, token: int) -> str:
        """The same as text; a part of a character is a replacement character."""
        return self._pieces[token].decode(errors="replace")
