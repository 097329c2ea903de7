"""A model folder's tokenizer, chat template and end tokens."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from pannier.gateway.text import Text
from pannier.runtime.errors import ModelError
from pannier.scheduler import Rejected
from pannier.wire.messages import ChatMessage

pytestmark = pytest.mark.timeout(60)
WriteModel = Callable[..., Path]


@pytest.fixture
def plain(tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    return tokenizers["byte-level"]


def test_a_prompt_gets_the_special_tokens_around_it(write_model: WriteModel, plain: Tokenizer) -> None:
    """As the tokenizer's own post-processor says."""
    text = Text.load(write_model(plain))
    tokens = text.encode("the earth")
    assert tokens[0] == plain.token_to_id("<s>")
    assert tokens[1:] == tuple(plain.encode("the earth").ids)
    assert text.decode(tokens) == "the earth"


def test_a_bare_text_gets_none(write_model: WriteModel, plain: Tokenizer) -> None:
    """As it may stand anywhere in an output."""
    assert Text.load(write_model(plain)).encode_bare(" earth") == tuple(plain.encode(" earth").ids)


def test_a_conversation_is_rendered_by_the_template_up_to_the_answer(write_model: WriteModel, plain: Tokenizer) -> None:
    """Without a second start token: the template says where those go."""
    text = Text.load(write_model(plain))
    tokens = text.encode_chat(
        [ChatMessage("user", "the earth"), ChatMessage("model", "void"), ChatMessage("user", "?")]
    )
    assert tokens == tuple(plain.encode("<|user|>the earth<|model|>void<|user|>?<|model|>").ids)


def test_a_model_without_template_refuses_conversations(write_model: WriteModel, plain: Tokenizer) -> None:
    """And says what to send."""
    text = Text.load(write_model(plain, template=None))
    with pytest.raises(Rejected, match="no chat template; send a prompt") as caught:
        text.encode_chat([ChatMessage("user", "hello")])
    assert (caught.value.code, caught.value.param) == ("invalid", "messages")


def test_what_the_template_refuses_is_passed_on(write_model: WriteModel, plain: Tokenizer) -> None:
    """With the template's own words."""
    text = Text.load(write_model(plain))
    with pytest.raises(Rejected, match="template refuses the messages: no role wizard"):
        text.encode_chat([ChatMessage("wizard", "hello")])


@pytest.mark.parametrize("template", ["{{ 1 // 0 }}", "{{ messages[0]['content'].index('z') }}", "{{ [][0].x }}"])
def test_however_a_template_fails_the_request_is_refused(
    write_model: WriteModel, plain: Tokenizer, template: str
) -> None:
    """It is the model's own program."""
    text = Text.load(write_model(plain, template=template))
    with pytest.raises(Rejected, match="template refuses the messages"):
        text.encode_chat([ChatMessage("user", "hello")])


def test_end_tokens_come_from_every_place_that_names_them(write_model: WriteModel, plain: Tokenizer) -> None:
    """generation_config.json (several), config.json (one) and the tokenizer."""
    text = Text.load(write_model(plain, generation_config={"eos_token_id": [40, 41]}, config={"eos_token_id": 42}))
    assert text.eos_tokens == {40, 41, 42, plain.token_to_id("</s>")}


def test_end_tokens_have_no_text(write_model: WriteModel, plain: Tokenizer) -> None:
    """Also those that the tokenizer doesn't call special."""
    (word,) = plain.encode(" the").ids
    text = Text.load(write_model(plain, config={"eos_token_id": word}))
    assert text.detokenizer(()).push(word) == ""
    assert text.decode([word]) == ""


def test_long_prompts_are_not_cut(write_model: WriteModel, plain: Tokenizer) -> None:
    """A length limit in tokenizer.json would hide that a prompt is too long."""
    short = Tokenizer.from_str(plain.to_str())
    short.enable_truncation(4)
    short.enable_padding(length=64)
    text = Text.load(write_model(short))
    assert text.encode("the earth " * 9)[1:] == tuple(plain.encode("the earth " * 9).ids)


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    """In one sentence that names the folder."""
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=f"^{tmp_path} has no tokenizer"):
        Text.load(tmp_path)


def test_a_broken_tokenizer_is_refused(write_model: WriteModel, plain: Tokenizer) -> None:
    """Naming the folder."""
    path = write_model(plain)
    (path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=f"^the tokenizer in {path} can't be loaded: "):
        Text.load(path)


@pytest.mark.slow
def test_a_folder_that_names_a_class_gets_that_class(write_model: WriteModel, tokenizers: dict[str, Tokenizer]) -> None:
    """The library's own loader decides, and gives the same text."""
    gpt2 = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "</s>"}
    path = write_model(tokenizers["byte-level"], tokenizer_config=gpt2, config={"model_type": "gpt2"})
    text = Text.load(path)
    assert text.decode(text.encode("the earth, void")) == "the earth, void"


@pytest.mark.slow
def test_a_self_contained_tokenizer_loads_without_torch(write_model: WriteModel, plain: Tokenizer) -> None:
    """A second of every start."""
    path = write_model(plain)
    program = (
        "import sys, pathlib; from pannier.gateway.text import Text; "
        "from pannier.wire.messages import ChatMessage; "
        f"Text.load(pathlib.Path({str(path)!r})).encode_chat([ChatMessage('user', 'hello')]); "
        "sys.exit('torch' in sys.modules)"
    )
    search_path = f"import sys; sys.path[:] = {sys.path!r}; "
    subprocess.run([sys.executable, "-c", search_path + program], check=True, timeout=50)
