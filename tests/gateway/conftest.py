"""Real tokenizers, small ones, trained here: one for each way in which tokens become text."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "In the beginning God created the heaven and the earth. And the earth was without form, and void.",
    "  two spaces, a tab\tand a line\nbreak; naïve café, 5 € and 12 °C",
    "Стол стоит там. 山の上に家がある。 🐴 carries a pannier 🧺 up the hill",
] * 4
SPECIAL = ["<unk>", "<s>", "</s>", "<|user|>", "<|model|>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def _byte_level() -> Tokenizer:
    """As gpt2, llama 3, qwen: every token is a string of bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _sentencepiece(*, strip: bool) -> Tokenizer:
    """As llama 2 (which drops the first space) and gemma (which doesn't): unknown characters are bytes."""
    ascii_only = [line.encode("ascii", "ignore").decode().replace(" ", "▁") for line in CORPUS]
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.train_from_iterator(
        ascii_only, trainers.BpeTrainer(vocab_size=600, special_tokens=SPECIAL + BYTES, show_progress=False)
    )
    model: dict[str, Any] = json.loads(trained.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = Tokenizer(models.BPE(model["vocab"], merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.add_special_tokens(list(SPECIAL))
    steps: list[Any] = [normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), *steps] if strip else steps)
    joined = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*joined, decoders.Strip(" ", 1, 0)] if strip else joined)
    return tokenizer


def _metaspace() -> Tokenizer:
    """As t5 and its kin: a decoder that drops the space of whatever token comes first."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _word_pieces() -> Tokenizer:
    """As bert: words are joined by spaces, and the decoder takes some of them away again."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=300, special_tokens=SPECIAL, show_progress=False)
    )
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": _byte_level,
    "llama-2": lambda: _sentencepiece(strip=True),
    "gemma": lambda: _sentencepiece(strip=False),
    "metaspace": _metaspace,
    "word-pieces": _word_pieces,
}


@pytest.fixture(scope="session")
def tokenizers() -> dict[str, Tokenizer]:
    """One tokenizer of each kind."""
    made = {kind: make() for kind, make in KINDS.items()}
    for tokenizer in made.values():
        tokenizer.add_tokens([AddedToken("[plain added]", special=False)])
    return made


@pytest.fixture(scope="session", params=list(KINDS))
def tokenizer(request: pytest.FixtureRequest, tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    """Each kind in turn."""
    return tokenizers[request.param]


TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role not in ['user', 'model'] %}{{ raise_exception('no role ' + message.role) }}{% endif %}"
    "<|{{ message.role }}|>{{ message.content }}"
    "{% endfor %}{% if add_generation_prompt %}<|model|>{% endif %}"
)


@pytest.fixture
def write_model(tmp_path: Path) -> Callable[..., Path]:
    """Writes a model folder: a tokenizer with <s> before every prompt, and the files that name end tokens."""

    def write(tokenizer: Tokenizer, *, template: str | None = TEMPLATE, **files: dict[str, Any]) -> Path:
        start = Tokenizer.from_str(tokenizer.to_str())
        start.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", start.token_to_id("<s>"))]
        )
        start.save(str(tmp_path / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "chat_template": template}
        contents: dict[str, dict[str, Any]] = {"tokenizer_config": settings, "config": {}, **files}
        for name, content in contents.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
        return tmp_path

    return write
