"""Guides: whatever is drawn among the allowed tokens, the text has the shape that was asked for, and ends."""

import json
import re
from array import array
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from pannier.gateway.guides import MAX_CHARACTERS, Guides
from pannier.gateway.text import Text
from pannier.scheduler import Constraint, Rejected
from pannier.scheduler.blocks import Ints
from pannier.wire.messages import Guide, GuideKind

pytestmark = pytest.mark.timeout(60)
EMBEDDED = Path(__file__).parents[2] / "common/pannier/models/embedded"
VOCABULARY = 3100
"""Larger than the tokenizer's, as of models whose sizes are rounded up."""
SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}, "kind": {"enum": ["ox", "ass"]}},
    "required": ["age", "kind"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def text() -> Text:
    return Text.load(EMBEDDED)


@pytest.fixture(scope="module")
def guides(text: Text) -> Guides:
    return Guides(text, VOCABULARY, sorted(text.eos_tokens))


def drawn(constraint: Constraint, end_tokens: frozenset[int], chance: Random, most: int = 200) -> Ints:
    """Any tokens that are allowed, up to the end."""
    tokens = array("i")
    while len(tokens) < most:
        mask = constraint.allowed(tokens)
        assert len(mask) == 4 * -(-VOCABULARY // 32)
        allowed = [token for token in range(VOCABULARY) if mask[token // 8] >> token % 8 & 1]
        token = chance.choice(allowed)
        if token in end_tokens:
            return tokens
        tokens.append(token)
    raise AssertionError("it has no end")


def follow(constraint: Constraint, tokens: list[int]) -> None:
    """Ask for the mask in front of each token and behind the last."""
    for length in range(len(tokens) + 1):
        constraint.allowed(array("i", tokens[:length]))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1 << 30))
def test_any_allowed_draws_are_json_of_the_schema(guides: Guides, text: Text, seed: int) -> None:
    constraint = guides.compile(Guide(GuideKind.JSON_SCHEMA, json.dumps(SCHEMA)))
    found = json.loads(text.decode(drawn(constraint, text.eos_tokens, Random(seed), most=2000)))
    assert set(found) == {"age", "kind"}
    assert 0 <= found["age"] <= 99
    assert found["kind"] in ("ox", "ass")


@pytest.mark.parametrize(
    ("kind", "guide"),
    [(GuideKind.REGEX, "(yes|no), [0-9]{2}"), (GuideKind.GRAMMAR, 'start: ("yes" | "no") ", " /[0-9]{2}/')],
)
def test_any_allowed_draws_match_the_expression(guides: Guides, text: Text, kind: GuideKind, guide: str) -> None:
    for seed in range(20):
        constraint = guides.compile(Guide(kind, guide))
        found = text.decode(drawn(constraint, text.eos_tokens, Random(seed)))
        assert re.fullmatch("(yes|no), [0-9]{2}", found)


def test_outputs_of_one_request_are_followed_apart_and_again(guides: Guides, text: Text) -> None:
    """In turns, from a fork on, and once more from the beginning, as after a preemption."""
    constraint = guides.compile(Guide(GuideKind.REGEX, "(yes|no), [0-9]{2}"))
    outputs = [array("i", text.encode_bare(each)) for each in ("yes, 12", "no, 34")]
    for length in range(1, 4):
        for output in outputs:
            fresh = guides.compile(Guide(GuideKind.REGEX, "(yes|no), [0-9]{2}"))
            assert constraint.allowed(output[:length]) == fresh.allowed(output[:length])
    fresh = guides.compile(Guide(GuideKind.REGEX, "(yes|no), [0-9]{2}"))
    assert constraint.allowed(outputs[0][:1]) == fresh.allowed(outputs[0][:1])


@pytest.mark.parametrize(
    ("guide", "reason"),
    [
        (Guide(GuideKind.JSON_SCHEMA, "["), "the json schema can't be used"),
        (Guide(GuideKind.JSON_SCHEMA, '{"type": "nope"}'), "Invalid type: nope"),
        (Guide(GuideKind.REGEX, "(["), "the regex can't be used"),
        (Guide(GuideKind.GRAMMAR, "start: other"), "the grammar can't be used"),
        (Guide(GuideKind.REGEX, "a" * (MAX_CHARACTERS + 1)), f"at most {MAX_CHARACTERS} are allowed"),
    ],
)
def test_a_guide_that_is_none_is_refused_with_the_reason(guides: Guides, guide: Guide, reason: str) -> None:
    with pytest.raises(Rejected, match=re.escape(reason)) as refused:
        guides.compile(guide)
    assert refused.value.param == "guide"


CHAIN = {f"a{number}": {"$ref": f"#/$defs/a{number + 1}"} for number in range(6000)}


@pytest.mark.parametrize(
    "guide",
    [
        Guide(GuideKind.JSON_SCHEMA, json.dumps({"$ref": "#/$defs/a0", "$defs": CHAIN | {"a6000": {"const": 1}}})),
        Guide(GuideKind.GRAMMAR, "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(8000)) + 'r8000: "a"'),
        Guide(GuideKind.JSON_SCHEMA, '{"type": "integer", "multipleOf": 99999999}'),
    ],
    ids=["a chain of references", "a chain of rules", "a large divisor"],
)
def test_a_guide_that_ends_its_compiler_is_refused_and_the_next_one_compiled(guides: Guides, guide: Guide) -> None:
    """They overflow its stack, or take it hours; the gateway stays."""
    with pytest.raises(Rejected, match="too deep") as refused:
        guides.compile(guide)
    assert (refused.value.code, refused.value.param) == ("invalid", "guide")
    guides.compile(Guide(GuideKind.REGEX, f"a{len(guide.text)}"))


def test_a_refusal_repeats_no_more_than_the_beginning_of_what_was_sent(guides: Guides) -> None:
    with pytest.raises(Rejected) as refused:
        guides.compile(Guide(GuideKind.GRAMMAR, "start: " + "(" * 20000))
    assert len(refused.value.reason) < 500


FIELDS = {f"p{number}": {"type": "string"} for number in range(30)}
WIDE = {"anyOf": [{"type": "object", "properties": FIELDS, "title": str(number)} for number in range(100)]}


@pytest.mark.parametrize(
    ("guide", "reason"),
    [
        (Guide(GuideKind.JSON_SCHEMA, json.dumps(WIDE)), "the json schema can't be followed behind 1 tokens: Parser"),
        (Guide(GuideKind.GRAMMAR, 'start: "a"{100000000}'), "the grammar can't be followed behind 1 tokens: parser"),
        (Guide(GuideKind.REGEX, "((a{1,1000}){1,1000}){1,1000}"), "the regex can't be followed behind"),
    ],
    ids=["a wide choice", "a long count", "nested counts"],
)
def test_where_the_library_comes_to_a_limit_the_guide_says_so_and_can_be_begun_again(
    guides: Guides, text: Text, guide: Guide, reason: str
) -> None:
    """Never an end: the text is not finished. Others that ask for the same guide are none the worse."""
    (letter,) = text.encode_bare("{" if guide.kind == GuideKind.JSON_SCHEMA else "a")
    for _ in range(2):
        constraint = guides.compile(guide)
        with pytest.raises(Rejected, match=reason) as refused:
            follow(constraint, [letter] * 100)
        assert (refused.value.code, refused.value.param) == ("invalid", "guide")


@pytest.mark.parametrize(
    "guide",
    [
        Guide(GuideKind.REGEX, r"[^\s\S]"),
        Guide(GuideKind.GRAMMAR, "start: start"),
        Guide(GuideKind.JSON_SCHEMA, '{"$ref": "#"}'),
    ],
)
def test_a_guide_that_no_text_fits_is_refused(guides: Guides, guide: Guide) -> None:
    for _ in range(2):
        with pytest.raises(Rejected, match="can't be used: no text that the model's tokens spell fits it") as refused:
            guides.compile(guide)
        assert refused.value.param == "guide"


def test_a_guide_that_breaks_the_library_at_its_beginning_is_refused(guides: Guides) -> None:
    with pytest.raises(Rejected, match="the grammar can't be used: panic"):
        guides.compile(Guide(GuideKind.GRAMMAR, 'start: a "b"\na[lazy]: /(.*)/'))


WriteModel = Callable[..., Path]


def test_what_no_token_spells_ends_a_text_only_where_it_may_end(
    write_model: WriteModel, tokenizers: dict[str, Tokenizer]
) -> None:
    """An error where more must come: an end would pass off half a text for all of it."""
    text = Text.load(write_model(tokenizers["byte-level"]))
    end = sorted(text.eos_tokens)
    vocab_size = text.encode_bare("\0")[0]  # a model that lacks the last ones of its tokenizer, control characters
    guides = Guides(text, vocab_size, end)
    letter = array("i", text.encode_bare("a"))
    mask = guides.compile(Guide(GuideKind.REGEX, "a\x7f?")).allowed(letter)
    assert [token for token in range(vocab_size) if mask[token // 8] >> token % 8 & 1] == end
    with pytest.raises(Rejected, match="the regex can't be followed behind 1 tokens: no token fits"):
        guides.compile(Guide(GuideKind.REGEX, "a\x7f")).allowed(letter)
