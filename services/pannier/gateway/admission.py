"""Whether a request can be served: decided once, and never checked again behind here."""

import secrets
from dataclasses import dataclass

from pannier.gateway.output_text import OutputText
from pannier.gateway.text import Text
from pannier.scheduler import Rejected, Request
from pannier.wire.messages import MAX_TOP_LOGPROBS, Generate, SamplingParams

MAX_TEMPERATURE = 2.0
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
SEED_BITS = 63


@dataclass(frozen=True)
class Admitted:
    """A request that can be served: what the scheduler runs, and what becomes of the tokens it draws."""

    request: Request
    output: OutputText


@dataclass(frozen=True)
class Admission:
    """What one model can serve."""

    model: str
    text: Text | None
    """None: a model without tokenizer (random weights), which takes and gives token ids only."""
    vocab_size: int
    max_model_len: int
    """Tokens of prompt and output together."""

    def admit(self, message: Generate, sequence: int, capacity: int) -> Admitted:
        """The request as `sequence`. Raises `Rejected` naming the field, its value and what is legal.

        `capacity` is tokens that the cache can hold of one sequence: as much as is generated when nobody says how much.
        """
        self._check_model(message.model)
        params = message.params
        _check_params(params)
        self._check_stop(params.stop)
        field, prompt = self._read_prompt(message)
        self._check_prompt(field, prompt)
        detokenizer = self.text.detokenizer(prompt) if self.text else None
        return Admitted(self._request(prompt, params, sequence, capacity), OutputText(detokenizer, params.stop))

    def _request(self, prompt: tuple[int, ...], params: SamplingParams, sequence: int, capacity: int) -> Request:
        room = self.max_model_len - len(prompt)
        wanted = max(1, capacity - len(prompt)) if params.max_tokens is None else params.max_tokens
        eos_tokens = frozenset[int]() if self.text is None or params.ignore_eos else self.text.eos_tokens
        return Request(
            sequence=sequence,
            prompt=prompt,
            max_tokens=min(room, wanted),
            temperature=params.temperature,
            seed=secrets.randbits(SEED_BITS) if params.seed is None else params.seed,
            logprobs=params.logprobs,
            eos_tokens=eos_tokens,
            step_by_step=bool(params.stop),
        )

    def _check_model(self, model: str | None) -> None:
        _require(model in (None, self.model), "model", f"model {model!r} is not served here; {self.model!r} is")

    def _read_prompt(self, message: Generate) -> tuple[str, tuple[int, ...]]:
        """The field that holds the prompt, and its token ids."""
        given = [name for name in ("prompt", "prompt_tokens", "messages") if getattr(message, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise Rejected("invalid", "prompt", f"give exactly one of prompt, prompt_tokens and messages, not {found}")
        field = given[0]
        if message.prompt_tokens is not None:
            return field, message.prompt_tokens
        if self.text is None:
            raise Rejected("invalid", field, f"model {self.model!r} has no tokenizer; send prompt_tokens, not {field}")
        if message.messages is not None:
            _require(len(message.messages) > 0, field, "messages is empty; it must hold at least 1 message")
            return field, self.text.encode_chat(message.messages)
        assert message.prompt is not None
        return field, self.text.encode(message.prompt)

    def _check_prompt(self, field: str, prompt: tuple[int, ...]) -> None:
        _require(len(prompt) > 0, field, f"{field} is empty; it must hold at least 1 token")
        _require(
            len(prompt) < self.max_model_len,
            field,
            f"{field} has {len(prompt)} tokens and the model's window is {self.max_model_len}; "
            f"at most {self.max_model_len - 1} leave room for an answer",
        )
        for token in (min(prompt), max(prompt)):
            _require(
                0 <= token < self.vocab_size,
                field,
                f"{field} holds token {token}; this model's tokens are 0 to {self.vocab_size - 1}",
            )

    def _check_stop(self, stop: tuple[str, ...]) -> None:
        _require(
            len(stop) <= MAX_STOP_STRINGS,
            "stop",
            f"stop holds {len(stop)} strings; at most {MAX_STOP_STRINGS} are allowed",
        )
        for string in stop:
            _require(
                1 <= len(string) <= MAX_STOP_CHARACTERS,
                "stop",
                f"stop holds a string of {len(string)} characters; 1 to {MAX_STOP_CHARACTERS} are allowed",
            )
        if stop and self.text is None:
            raise Rejected("invalid", "stop", f"model {self.model!r} has no tokenizer, so stop strings can't be found")


def _check_params(params: SamplingParams) -> None:
    """The limits that are the same for every model."""
    max_tokens, temperature, logprobs, seed = params.max_tokens, params.temperature, params.logprobs, params.seed
    _require(max_tokens is None or max_tokens >= 1, "max_tokens", f"max_tokens must be at least 1, not {max_tokens}")
    _require(
        0 <= temperature <= MAX_TEMPERATURE,
        "temperature",
        f"temperature must be between 0 and {MAX_TEMPERATURE:g}, not {temperature:g}",
    )
    _require(
        logprobs is None or 0 <= logprobs <= MAX_TOP_LOGPROBS,
        "logprobs",
        f"logprobs must be between 0 and {MAX_TOP_LOGPROBS}, not {logprobs}",
    )
    _require(
        seed is None or 0 <= seed < 1 << SEED_BITS, "seed", f"seed must be between 0 and 2^{SEED_BITS} - 1, not {seed}"
    )


def _require(holds: bool, param: str, reason: str) -> None:
    if not holds:
        raise Rejected("invalid", param, reason)
