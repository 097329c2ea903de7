"""The model's text side: its tokenizer, chat template and end tokens."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pannier.gateway.detokenize import IncrementalDetokenizer, Pieces
from pannier.runtime.errors import ModelError
from pannier.scheduler import Rejected
from pannier.wire.messages import ChatMessage

if TYPE_CHECKING:
    from transformers.tokenization_utils_tokenizers import TokenizersBackend

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "*.tiktoken",
)
"""A model folder has at least one of these if it has a tokenizer."""

SELF_CONTAINED = ("TokenizersBackend", "PreTrainedTokenizerFast")
"""Classes that take tokenizer.json as it stands."""


class Text:
    """Between text and token ids, for one model.

    Attributes:
        eos_tokens: every token that ends an output.
    """

    def __init__(self, tokenizer: "TokenizersBackend", eos_tokens: frozenset[int]) -> None:
        self.eos_tokens = eos_tokens
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()  # a prompt that is too long is refused, not cut
        self._backend.no_padding()
        self._pieces = Pieces(self._backend, silent=eos_tokens)

    @classmethod
    def load(cls, path: Path) -> Self:
        """The tokenizer in a model folder. Raises `ModelError` when there is none that can be used."""
        if not any(next(path.glob(name), None) for name in TOKENIZER_FILES):
            raise ModelError(
                f"{path} has no tokenizer ({', '.join(TOKENIZER_FILES)}); add the files that came with the model"
            )
        tokenizer = _load_tokenizer(path)
        if not getattr(tokenizer, "is_fast", False):
            raise ModelError(
                f"the tokenizer in {path} is a {type(tokenizer).__name__}; one with tokenizer.json is needed"
            )
        declared = tokenizer.eos_token_id
        return cls(tokenizer, _eos_tokens(path) | (frozenset() if declared is None else {declared}))

    def encode(self, prompt: str) -> tuple[int, ...]:
        """Token ids of a prompt, with the special tokens that the model wants around it."""
        return self._encode(prompt, special=True)

    def encode_bare(self, text: str) -> tuple[int, ...]:
        """Token ids of a text as it may stand anywhere in an output."""
        return self._encode(text, special=False)

    def encode_chat(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        """Token ids of a conversation up to where the model's turn begins, by the model's template.

        Raises `Rejected` when the model has no template, or its template refuses the conversation.
        """
        if self._tokenizer.chat_template is None:
            raise Rejected("invalid", "messages", "this model has no chat template; send a prompt instead of messages")
        return self._encode(self._render(messages), special=False)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of a whole output; special and end tokens have none."""
        return self._pieces.decode([token for token in tokens if self._pieces.has_text(token)])

    @property
    def num_tokens(self) -> int:
        """Of the tokenizer; a model may have more, or fewer."""
        size: int = self._backend.get_vocab_size(with_added_tokens=True)
        return size

    def to_json(self) -> str:
        """The tokenizer as tokenizer.json has it."""
        text: str = self._backend.to_str()
        return text

    def piece(self, token: int) -> bytes:
        """The bytes that a token stands for, which may be a part of a character; a special one's name."""
        return self._pieces.piece(token)

    def detokenizer(self, prompt: Sequence[int]) -> IncrementalDetokenizer:
        """For the output that follows `prompt`."""
        return IncrementalDetokenizer(self._pieces, prompt)

    def _encode(self, text: str, *, special: bool) -> tuple[int, ...]:
        # A batch of one: unlike `encode` it lets other threads run meanwhile, and leaves out offsets.
        (encoded,) = self._backend.encode_batch_fast([text], add_special_tokens=special)
        return tuple(encoded.ids)

    def _render(self, messages: Sequence[ChatMessage]) -> str:
        turns = [{"role": message.role, "content": message.content} for message in messages]
        try:
            text = self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template is a program of the model's, which may fail in any way
            raise Rejected("invalid", "messages", f"the model's chat template refuses the messages: {error}") from error
        assert isinstance(text, str)
        return text


def _load_tokenizer(path: Path) -> Any:
    # Imported here, for the client side of the gateway must start without them; and AutoTokenizer imports torch,
    # which a folder that names no class of its own doesn't need.
    settings = _read_json(path / "tokenizer_config.json")
    try:
        if settings.get("tokenizer_class") in SELF_CONTAINED and "auto_map" not in settings:
            from transformers.tokenization_utils_tokenizers import TokenizersBackend

            return TokenizersBackend.from_pretrained(path, local_files_only=True)
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever is wrong with these files, the folder is what must change
        raise ModelError(f"the tokenizer in {path} can't be loaded: {error}") from error


def _eos_tokens(path: Path) -> frozenset[int]:
    """What generation_config.json and config.json name; each may name none, one or several."""
    configs = [_read_json(path / "generation_config.json"), _read_json(path / "config.json")]
    named = [config.get("eos_token_id") for config in configs]
    return frozenset(
        token for tokens in named for token in (tokens if isinstance(tokens, list) else [tokens]) if token is not None
    )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds a {type(content).__name__}; it must hold an object")
    return content
