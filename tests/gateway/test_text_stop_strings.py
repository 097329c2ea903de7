"""Text goes out up to the first stop string, however it is cut into pieces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pannier.gateway.stop_strings import StopStrings

pytestmark = pytest.mark.timeout(30)
letters = st.text("ab.", max_size=12)
stops = st.lists(st.text("ab.", min_size=1, max_size=4), min_size=1, max_size=3)


def test_text_that_may_begin_a_stop_string_is_held_back() -> None:
    """And shown as soon as it can't be one any more."""
    stop = StopStrings(["END"])
    assert [stop.push(text) for text in ("the E", "N", "D of it", "all")] == ["the ", "", "", ""]
    assert stop.matched


def test_text_that_turns_out_harmless_is_shown() -> None:
    """Held text comes with the piece that decides it."""
    stop = StopStrings(["END"])
    assert [stop.push(text) for text in ("the E", "N", "tire")] == ["the ", "", "ENtire"]
    assert not stop.matched


def test_flush_gives_what_was_held() -> None:
    """An output that ends with half a stop string keeps it."""
    stop = StopStrings(["\n\n"])
    assert stop.push("verse\n") == "verse"
    assert stop.flush() == "\n"
    assert stop.flush() == ""


def test_a_stop_string_that_overlaps_itself_is_found() -> None:
    """The held end is the longest that may begin one."""
    stop = StopStrings(["aab"])
    assert [stop.push(text) for text in ("aa", "ab")] == ["", "a"]
    assert stop.matched


def test_an_included_stop_string_is_shown_to_its_end() -> None:
    """And nothing behind it, in whatever pieces it comes."""
    stop = StopStrings(["END"], include=True)
    assert "".join(stop.push(text) for text in ("the E", "ND of", " it")) == "the END"
    assert stop.matched


def test_what_is_complete_in_text_that_may_not_stop_is_text() -> None:
    """Also where it could have been completed in several ways, and what comes behind it still counts."""
    stop = StopStrings(["ab", "abc"])
    assert stop.push("ab", may_stop=False) == ""
    assert stop.push("x") == "abx"
    assert stop.push("ab") == ""
    assert stop.matched


def test_what_only_begins_in_text_that_may_not_stop_counts() -> None:
    """Its end decides."""
    stop = StopStrings(["END"])
    assert stop.push("the EN", may_stop=False) == "the "
    assert stop.push("D of") == ""
    assert stop.matched


def cut(text: str, strings: list[str]) -> tuple[str, bool]:
    """By definition: grow the text letter by letter until it ends with a stop string."""
    for end in range(len(text) + 1):
        lengths = [len(string) for string in strings if text[:end].endswith(string)]
        if lengths:
            return text[: end - max(lengths)], True
    return text, False


@given(pieces=st.lists(letters, max_size=6), strings=stops)
def test_the_cut_does_not_depend_on_the_pieces(pieces: list[str], strings: list[str]) -> None:
    """Shown text and verdict are those of the whole text."""
    stop = StopStrings(strings)
    shown = "".join(stop.push(piece) for piece in pieces) + stop.flush()
    assert (shown, stop.matched) == cut("".join(pieces), strings)


@given(pieces=st.lists(letters, max_size=6), strings=stops)
def test_nothing_is_held_that_begins_no_stop_string(pieces: list[str], strings: list[str]) -> None:
    """After every piece, what is held is the beginning of some stop string."""
    stop = StopStrings(strings)
    given_text, shown = "", ""
    for piece in pieces:
        given_text, shown = given_text + piece, shown + stop.push(piece)
        held = given_text[len(shown) :]
        assert stop.matched or any(string.startswith(held) for string in strings)
