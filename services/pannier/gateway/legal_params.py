"""What the parameters of a request may be. Whatever isn't legal is named with its value and with what is."""

from collections.abc import Iterable
from math import isfinite

from pannier.scheduler import Rejected
from pannier.wire.messages import MAX_TOP_LOGPROBS, Generate, SamplingParams

MAX_N = 128
MAX_TEMPERATURE = 2.0
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 10.0  # a logit divided by next to nothing is no number any more
MAX_PENALTY = 2.0
MAX_BIAS = 100.0
MAX_BIASED_TOKENS = 1024
MAX_STOP_TOKENS = 128
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARACTERS = 256
MAX_SALT_CHARACTERS = 256
MAX_PRIORITY = (1 << 31) - 1
SEED_BITS = 63


def require(holds: bool, param: str, reason: str) -> None:
    """Raise `Rejected` unless the condition holds."""
    if not holds:
        raise Rejected("invalid", param, reason)


def check_options(message: Generate) -> None:
    """What concerns the request as a whole. Raises `Rejected`."""
    _between("priority", message.priority, -MAX_PRIORITY, MAX_PRIORITY)
    seconds, salt = message.deadline_s, message.cache_salt
    if seconds is not None:
        legal = isfinite(seconds) and seconds > 0
        require(legal, "deadline_s", f"deadline_s must be a number of seconds above 0, not {seconds:g}")
    if salt is not None:
        reason = f"cache_salt has {len(salt)} characters; 1 to {MAX_SALT_CHARACTERS} are allowed"
        require(1 <= len(salt) <= MAX_SALT_CHARACTERS, "cache_salt", reason)


def check_params(params: SamplingParams, *, vocab_size: int, max_model_len: int, max_sequences: int) -> None:
    """Every sampling parameter by itself, and those that limit each other. Raises `Rejected`."""
    _between("n", params.n, 1, min(MAX_N, max_sequences))
    _check_lengths(params, max_model_len)
    _check_filters(params)
    _check_penalties(params)
    _check_bias(params.logit_bias, vocab_size)
    _check_allowed(params.allowed_tokens, vocab_size)
    _check_strings("bad_words", params.bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_CHARACTERS)
    _check_strings("stop", params.stop, MAX_STOP_STRINGS, MAX_STOP_CHARACTERS)
    _check_number("stop_token_ids", len(params.stop_token_ids), "tokens", MAX_STOP_TOKENS)
    check_tokens("stop_token_ids", params.stop_token_ids, vocab_size)
    if params.seed is not None:
        legal = 0 <= params.seed < 1 << SEED_BITS
        require(legal, "seed", f"seed must be between 0 and 2^{SEED_BITS} - 1, not {params.seed}")
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(params, name) is not None:
            _between(name, getattr(params, name), 0, MAX_TOP_LOGPROBS)


def check_tokens(field: str, tokens: Iterable[int], vocab_size: int) -> None:
    """Raise `Rejected` unless the model has all these tokens."""
    for token in tokens:
        if not 0 <= token < vocab_size:
            reason = f"{field} holds token {token}; this model's tokens are 0 to {vocab_size - 1}"
            raise Rejected("invalid", field, reason)


def _check_lengths(params: SamplingParams, max_model_len: int) -> None:
    most, least = params.max_tokens, params.min_tokens
    require(most is None or most >= 1, "max_tokens", f"max_tokens must be at least 1, not {most}")
    if most is None:
        _between("min_tokens", least, 0, max_model_len - 1)
    else:
        legal = 0 <= least <= most
        require(legal, "min_tokens", f"min_tokens must be between 0 and max_tokens, which is {most}, not {least}")


def _check_filters(params: SamplingParams) -> None:
    _between("temperature", params.temperature, 0, MAX_TEMPERATURE)
    top_p = params.top_p
    require(0 < top_p <= 1, "top_p", f"top_p must be above 0 and at most 1, not {top_p:g}")
    require(params.top_k >= 0, "top_k", f"top_k must be at least 1, or 0 for all tokens, not {params.top_k}")
    _between("min_p", params.min_p, 0, 1)


def _check_penalties(params: SamplingParams) -> None:
    _between("repetition_penalty", params.repetition_penalty, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY)
    _between("presence_penalty", params.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
    _between("frequency_penalty", params.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)


def _check_bias(bias: dict[int, float], vocab_size: int) -> None:
    _check_number("logit_bias", len(bias), "tokens", MAX_BIASED_TOKENS)
    check_tokens("logit_bias", bias, vocab_size)
    for token, value in bias.items():
        legal = -MAX_BIAS <= value <= MAX_BIAS
        reason = f"logit_bias of token {token} must be between {-MAX_BIAS:g} and {MAX_BIAS:g}, not {value:g}"
        require(legal, "logit_bias", reason)


def _check_allowed(tokens: tuple[int, ...] | None, vocab_size: int) -> None:
    if tokens is not None:
        require(len(tokens) > 0, "allowed_tokens", "allowed_tokens is empty; it must hold at least 1 token")
        check_tokens("allowed_tokens", tokens, vocab_size)


def _check_strings(field: str, strings: tuple[str, ...], most: int, longest: int) -> None:
    _check_number(field, len(strings), "strings", most)
    for string in strings:
        reason = f"{field} holds a string of {len(string)} characters; 1 to {longest} are allowed"
        require(1 <= len(string) <= longest, field, reason)


def _check_number(field: str, number: int, things: str, most: int) -> None:
    require(number <= most, field, f"{field} holds {number} {things}; at most {most} are allowed")


def _between(field: str, value: float, least: float, most: float) -> None:
    """Not so for NaN either."""
    legal = f"between {_plain(least)} and {_plain(most)}"
    require(least <= value <= most, field, f"{field} must be {legal}, not {_plain(value)}")


def _plain(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"
