"""The deltas of a stream, joined, are the text of the whole; and no delta is ever taken back."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders

from pannier.gateway.detokenize import REPLACEMENT, IncrementalDetokenizer, Pieces

pytestmark = pytest.mark.timeout(60)
many = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def stream(tokenizer: Tokenizer, tokens: list[int], prompt: list[int] | None = None) -> list[str]:
    """The deltas of `tokens`, what `flush` gives last."""
    detokenizer = IncrementalDetokenizer(Pieces(tokenizer), prompt or [])
    return [*(detokenizer.push(token) for token in tokens), detokenizer.flush()]


def ids_of_bytes(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One token per byte."""
    tokens = (tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in data)
    return [token for token in tokens if token is not None]


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text).ids)


@many
@given(data=st.data())
def test_random_tokens_stream_as_they_decode(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Any tokens at all, special, unknown and half characters among them."""
    tokens = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() + 9), max_size=40))
    assert "".join(stream(tokenizer, tokens)) == tokenizer.decode(tokens, skip_special_tokens=True)


@many
@given(words=st.lists(st.binary(max_size=4) | st.sampled_from(["the", "</s>", "€", "🐴"]), max_size=10))
def test_raw_bytes_stream_as_they_decode(tokenizers: dict[str, Tokenizer], words: list[bytes | str]) -> None:
    """Runs of byte tokens, good and bad, between words."""
    for kind in ("llama-2", "gemma"):
        tokenizer = tokenizers[kind]
        parts = [ids(tokenizer, word) if isinstance(word, str) else ids_of_bytes(tokenizer, word) for word in words]
        tokens = [token for part in parts for token in part]
        assert "".join(stream(tokenizer, tokens)) == tokenizer.decode(tokens, skip_special_tokens=True)


@many
@given(text=st.text(max_size=40))
def test_any_text_streams_whole_and_without_premature_replacements(tokenizers: dict[str, Tokenizer], text: str) -> None:
    """No delta holds a replacement character that the text doesn't."""
    for kind in ("byte-level", "llama-2", "gemma"):
        tokenizer = tokenizers[kind]
        deltas = stream(tokenizer, ids(tokenizer, text))
        assert "".join(deltas) == tokenizer.decode(ids(tokenizer, text))
        assert "".join(deltas).count(REPLACEMENT) == text.count(REPLACEMENT)


@many
@given(prompt=st.text(max_size=20), output=st.text(max_size=20))
def test_output_continues_the_prompt(tokenizer: Tokenizer, prompt: str, output: str) -> None:
    """Prompt and deltas, joined, are the text of prompt and output: the first space is neither lost nor doubled."""
    before, after = ids(tokenizer, prompt), ids(tokenizer, output)
    known = tokenizer.decode(before).rstrip(REPLACEMENT)
    whole = tokenizer.decode(before + after)
    assert "".join(stream(tokenizer, after, before)) == whole.removeprefix(known)


@pytest.mark.parametrize("kind", ["byte-level", "llama-2", "gemma"])
def test_a_prompt_that_ends_inside_a_character_is_completed(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    """The character belongs to the output."""
    tokenizer = tokenizers[kind]
    tokens = ids(tokenizer, "it costs 5 \U0001f98a!")
    cut = next(n for n in range(len(tokens)) if tokenizer.decode(tokens[:n]).endswith(REPLACEMENT)) + 1
    assert "".join(stream(tokenizer, tokens[cut:], tokens[:cut])) == "\U0001f98a!"


def test_a_character_is_shown_with_its_last_byte(tokenizers: dict[str, Tokenizer]) -> None:
    """Byte-level text waits for no further token."""
    tokenizer = tokenizers["byte-level"]
    fox = ids(tokenizer, "\U0001f98a")
    assert len(fox) > 1
    assert stream(tokenizer, fox) == [*[""] * (len(fox) - 1), "\U0001f98a", ""]


def test_plain_words_are_shown_at_once(tokenizer: Tokenizer) -> None:
    """Nothing waits that no later token could change."""
    tokens = ids(tokenizer, "the earth and the heaven")
    assert stream(tokenizer, tokens)[-1] == ""


def test_bad_bytes_do_not_hold_back_what_precedes_them(tokenizers: dict[str, Tokenizer]) -> None:
    """Only the last, unfinished character waits."""
    tokenizer = tokenizers["byte-level"]
    lone = ids(tokenizer, "\U0001f98a")[0]
    tokens = [*ids(tokenizer, "void"), lone, lone, lone]
    assert "".join(stream(tokenizer, tokens)[:-1]) == "void" + 2 * REPLACEMENT


def test_special_tokens_have_no_text_and_leave_no_mark(tokenizers: dict[str, Tokenizer]) -> None:
    """The space of the word behind one survives, although decoders drop the first token's."""
    for kind in ("llama-2", "metaspace"):
        tokenizer = tokenizers[kind]
        (end,) = ids(tokenizer, "</s>")[-1:]
        the, earth = ids(tokenizer, "the"), ids(tokenizer, "earth")
        assert "".join(stream(tokenizer, [*the, end, *earth])) == tokenizer.decode(the + earth) == "the earth"


def test_tokens_that_decode_to_nothing_do_not_swallow_a_space(tokenizers: dict[str, Tokenizer]) -> None:
    """Such a token alone is no boundary: a decoder would take the next one for the first."""
    tokenizer = Tokenizer.from_str(tokenizers["llama-2"].to_str())
    the, earth, nothing = ids(tokenizer, "the"), ids(tokenizer, "earth"), ids(tokenizer, "<")[-1]
    unseen = decoders.Replace(tokenizer.id_to_token(nothing) or "", "")
    tokenizer.decoder = decoders.Sequence([unseen, tokenizers["llama-2"].decoder])
    assert "".join(stream(tokenizer, [*the, nothing, *earth])) == "the earth"


def test_silent_tokens_have_no_text(tokenizers: dict[str, Tokenizer]) -> None:
    """An end token is no text even where the tokenizer doesn't call it special."""
    tokenizer = tokenizers["byte-level"]
    (plain,) = ids(tokenizer, "[plain added]")
    assert not Pieces(tokenizer, silent=[plain]).has_text(plain)
    assert Pieces(tokenizer).has_text(plain)


@many
@given(text=st.text(max_size=40))
def test_the_pieces_of_a_text_are_its_bytes(tokenizers: dict[str, Tokenizer], text: str) -> None:
    """Each token's own, whether it is a word, a byte or half a character; a leading space may be one too many."""
    for kind in ("byte-level", "llama-2", "gemma"):
        tokenizer = tokenizers[kind]
        tokens = ids(tokenizer, text)
        pieces = Pieces(tokenizer)
        assert all(map(pieces.has_text, tokens))
        joined = b"".join(map(pieces.piece, tokens)).decode()
        assert joined in (tokenizer.decode(tokens), " " + tokenizer.decode(tokens))


def test_the_piece_of_a_special_token_is_its_name_and_of_none_empty(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["llama-2"]
    (special,) = ids(tokenizer, "</s>")[-1:]
    assert Pieces(tokenizer).piece(special) == b"</s>"
    assert Pieces(tokenizer).piece(tokenizer.get_vocab_size() + 5) == b""
