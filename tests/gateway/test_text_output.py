"""Tokens go out with their text, and no further than a stop string."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from pannier.gateway.detokenize import REPLACEMENT, IncrementalDetokenizer, Pieces
from pannier.gateway.output_text import OutputText, Released
from pannier.wire.messages import Drawn

pytestmark = pytest.mark.timeout(60)


def drawn(token: int) -> Drawn:
    return Drawn(sequence=1, token=token, logprob=None, top=())


def read(output: OutputText, tokens: list[int]) -> list[Released]:
    """Everything that is released, until a stop string or the end of `tokens`."""
    released = []
    for token in tokens:
        released.append(output.push(drawn(token)))
        if output.stopped:
            return released
    return [*released, output.finish()]


def text_of(released: list[Released]) -> str:
    return "".join(piece.text for piece in released)


def tokens_of(released: list[Released]) -> list[int]:
    return [token.token for piece in released for token in piece.drawn]


def letters(tokenizer: Tokenizer, text: str) -> list[int]:
    """One token per character of `text`, which must be in the byte-level alphabet."""
    return [token for letter in text for token in tokenizer.encode(letter).ids]


def test_a_stop_string_over_several_tokens_cuts_text_and_tokens(tokenizers: dict[str, Tokenizer]) -> None:
    """Tokens that only spell the stop string are not released."""
    tokenizer = tokenizers["byte-level"]
    tokens = letters(tokenizer, "and END it")
    output = OutputText(IncrementalDetokenizer(Pieces(tokenizer)), ["END"])
    released = read(output, tokens)
    assert output.stopped
    assert text_of(released) == "and "
    assert tokens_of(released) == tokens[:4]


def test_a_token_that_is_partly_text_and_partly_stop_string_is_kept(tokenizers: dict[str, Tokenizer]) -> None:
    """The kept text can't be had without it."""
    tokenizer = tokenizers["byte-level"]
    (word,) = tokenizer.encode(" the").ids
    output = OutputText(IncrementalDetokenizer(Pieces(tokenizer)), ["he"])
    assert output.push(drawn(word)) == Released(" t", (drawn(word),))
    assert output.stopped


def test_a_stop_string_at_the_very_start_keeps_nothing(tokenizers: dict[str, Tokenizer]) -> None:
    """No text, no tokens."""
    tokenizer = tokenizers["byte-level"]
    output = OutputText(IncrementalDetokenizer(Pieces(tokenizer)), ["void"])
    released = read(output, letters(tokenizer, "void"))
    assert (text_of(released), tokens_of(released)) == ("", [])


def test_a_stop_string_in_text_that_is_held_to_the_end_is_found(tokenizers: dict[str, Tokenizer]) -> None:
    """A run of byte tokens is certain only when the output ends; the stop string in it still cuts."""
    tokenizer = tokenizers["llama-2"]
    found = (tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in b"yes no")
    tokens = [token for token in found if token is not None]
    output = OutputText(IncrementalDetokenizer(Pieces(tokenizer)), [" no"])
    released = read(output, tokens)
    assert output.stopped
    assert text_of(released) == "yes"


def test_an_included_stop_string_is_kept_with_its_tokens(tokenizers: dict[str, Tokenizer]) -> None:
    """Text and tokens end behind it."""
    tokenizer = tokenizers["byte-level"]
    tokens = letters(tokenizer, "and END it")
    output = OutputText(IncrementalDetokenizer(Pieces(tokenizer)), ["END"], include_stop=True)
    released = read(output, tokens)
    assert (text_of(released), tokens_of(released)) == ("and END", tokens[:7])


def test_a_stop_string_counts_only_behind_the_least_tokens(tokenizers: dict[str, Tokenizer]) -> None:
    """The first is completed by token 3, the second by token 7."""
    tokenizer = tokenizers["byte-level"]
    tokens = letters(tokenizer, "END END it")
    for min_tokens, text in ((2, ""), (3, "END "), (6, "END "), (7, "END END it")):
        output = OutputText(IncrementalDetokenizer(Pieces(tokenizer)), ["END"], min_tokens=min_tokens)
        assert text_of(read(output, tokens)) == text


@pytest.mark.parametrize("include_stop", [True, False])
def test_a_stop_token_is_text_only_if_that_is_wanted(tokenizers: dict[str, Tokenizer], include_stop: bool) -> None:
    """The token itself goes out in any case."""
    tokenizer = tokenizers["byte-level"]
    (the,), (earth, *_) = tokenizer.encode(" the").ids, tokenizer.encode(" earth").ids
    output = OutputText(IncrementalDetokenizer(Pieces(tokenizer)), include_stop=include_stop)
    released = [output.push(drawn(the)), output.push(drawn(earth), is_stop_token=True), output.finish()]
    assert tokens_of(released) == [the, earth]
    assert text_of(released) == tokenizer.decode([the, earth] if include_stop else [the])


def test_a_stop_token_releases_what_waited(tokenizers: dict[str, Tokenizer]) -> None:
    """Half a stop string before it is text."""
    tokenizer = tokenizers["byte-level"]
    *half, end = letters(tokenizer, "EN.")
    output = OutputText(IncrementalDetokenizer(Pieces(tokenizer)), ["END"])
    released = [*(output.push(drawn(token)) for token in half), output.push(drawn(end), is_stop_token=True)]
    assert text_of([*released, output.finish()]) == "EN"
    assert not output.stopped


def test_without_a_tokenizer_tokens_go_out_at_once() -> None:
    """Random weights have no text."""
    output = OutputText(None)
    assert output.push(drawn(7)) == Released("", (drawn(7),))
    assert output.finish() == Released("", ())


def test_without_stop_strings_no_token_waits(tokenizers: dict[str, Tokenizer]) -> None:
    """Half a character goes out as a token before it is text."""
    tokenizer = tokenizers["byte-level"]
    output = OutputText(IncrementalDetokenizer(Pieces(tokenizer)))
    first, *rest = tokenizer.encode("\U0001f98a").ids
    assert output.push(drawn(first)) == Released("", (drawn(first),))
    assert text_of(read(output, rest)) == "\U0001f98a"


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_what_goes_out_is_the_whole_or_ends_at_the_cut(tokenizers: dict[str, Tokenizer], data: st.DataObject) -> None:
    """Tokens are a prefix of what was drawn, in order, and their text covers the text that was shown."""
    tokenizer = tokenizers["byte-level"]
    tokens = letters(tokenizer, data.draw(st.text("ab. é€", max_size=20)))
    stop = data.draw(st.lists(st.text("ab. é€", min_size=1, max_size=3), max_size=2))
    output = OutputText(IncrementalDetokenizer(Pieces(tokenizer)), stop)
    released = read(output, tokens)
    kept = tokens_of(released)
    assert kept == tokens[: len(kept)]
    assert tokenizer.decode(kept).startswith(text_of(released))
    assert output.stopped or kept == tokens
    if output.stopped and kept:
        assert len(tokenizer.decode(kept[:-1]).rstrip(REPLACEMENT)) < len(text_of(released))
