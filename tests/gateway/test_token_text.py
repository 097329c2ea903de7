"""Text to tokens and back for whoever asks; what is wrong with a question is its answer."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from pannier.gateway.text import Text
from pannier.gateway.token_text import LONG, MAX_CHARACTERS, TokenText
from pannier.wire import messages as m

pytestmark = pytest.mark.timeout(60)
WriteModel = Callable[..., Path]


@pytest.fixture
def token_text(write_model: WriteModel, tokenizers: dict[str, Tokenizer]) -> TokenText:
    return TokenText(Text.load(write_model(tokenizers["byte-level"])))


@pytest.mark.parametrize("repeats", [1, LONG])
def test_there_and_back(token_text: TokenText, repeats: int) -> None:
    """Short ones at once, long ones in a thread: the same."""

    async def ask() -> None:
        text = "the horse € 🐴" * repeats
        tokens = await token_text.answer(m.Tokenize("r", text, None, add_special_tokens=False))
        assert isinstance(tokens, m.Tokens)
        back = await token_text.answer(m.Detokenize("s", tokens.tokens))
        assert isinstance(back, m.TokenText)
        assert (back.request, back.text, b"".join(back.pieces).decode()) == ("s", text, text)

    asyncio.run(ask())


@pytest.mark.parametrize(
    ("question", "param", "reason"),
    [
        (m.Tokenize("r", None, None), "text", "exactly one of text and messages"),
        (m.Tokenize("r", "a", (m.ChatMessage("user", "b"),)), "text", "exactly one of text and messages"),
        (m.Tokenize("r", "a" * (MAX_CHARACTERS + 1), None), "text", f"at most {MAX_CHARACTERS} are allowed"),
        (m.Detokenize("r", (-1,)), "tokens", "tokens holds -1"),
        (m.Detokenize("r", (1 << 40,)), "tokens", "which is no token"),
    ],
)
def test_a_bad_question_gets_one_clear_error(
    token_text: TokenText, question: m.Tokenize | m.Detokenize, param: str, reason: str
) -> None:
    answer = asyncio.run(token_text.answer(question))
    assert isinstance(answer, m.Failed)
    assert (answer.request, answer.code, answer.param) == ("r", "invalid", param)
    assert reason in answer.reason


def test_a_model_without_tokenizer_says_so() -> None:
    answer = asyncio.run(TokenText(None).answer(m.Detokenize("r", (1,))))
    assert isinstance(answer, m.Failed)
    assert "no tokenizer" in answer.reason
