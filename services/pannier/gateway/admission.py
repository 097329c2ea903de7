"""Whether a request can be served: decided once, and never checked again behind here."""

import secrets
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from pannier.gateway.allowed_tokens import AllowedTokens
from pannier.gateway.bad_words import spell
from pannier.gateway.guides import Guides
from pannier.gateway.legal_params import SEED_BITS, check_options, check_params, check_tokens, require
from pannier.gateway.output_text import OutputText
from pannier.gateway.text import Text
from pannier.scheduler import Constraint, Rejected, Request
from pannier.wire.messages import Filters, Generate, Guide, Penalties, SamplerRules, SamplingParams

LOWEST_TEMPERATURE = 0.01
"""Logits divided by less may be no numbers any more; the best token is certain long before that."""


@dataclass(frozen=True)
class Admitted:
    """A request that can be served: what the scheduler runs, and what becomes of the tokens that each sample draws."""

    request: Request
    outputs: tuple[OutputText, ...]


@dataclass(frozen=True, kw_only=True)
class Admission:
    """What one model can serve."""

    model: str
    text: Text | None
    """None: a model without tokenizer (random weights), which takes and gives token ids only."""
    vocab_size: int
    max_model_len: int
    """Tokens of prompt and output together."""
    max_sequences: int
    """Sequences that run at once."""
    guides: Guides | None = None
    """None: a model without tokenizer, or without a token that ends a text."""

    def read(self, message: Generate) -> tuple[int, ...]:
        """Check the request and return the tokens of its prompt. From any thread: a long text takes its time.

        Raises `Rejected` naming the field, its value and what is legal.
        """
        self._check_model(message.model)
        check_options(message)
        check_params(
            message.params,
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            max_sequences=self.max_sequences,
        )
        if self.text is None:
            self._refuse_text(message.params)
        if message.params.guide is not None:
            self._check_guide(message.params, message.params.guide)
        field, prompt = self._read_prompt(message)
        self._check_prompt(field, prompt)
        return prompt

    def admit(
        self, message: Generate, prompt: tuple[int, ...], *, sequences: Sequence[int], capacity: int, now: float
    ) -> Admitted:
        """The request, once `read`, with a number for each of its samples. Raises `Rejected` as `read` does.

        `capacity` is tokens that the cache can hold of one sequence: as much as is generated when nobody says how much.
        """
        params = message.params
        stop_tokens = self._stop_tokens(params)
        rules = self._rules(params, stop_tokens)
        self._check_choice(params.allowed_tokens, rules)
        request = Request(
            sequences=tuple(sequences),
            prompt=array("i", prompt),
            max_tokens=self._max_tokens(params, len(prompt), capacity),
            filters=self._filters(params),
            rules=None if rules == SamplerRules() else rules,
            seed=secrets.randbits(SEED_BITS) if params.seed is None else params.seed,
            logprobs=params.logprobs,
            prompt_logprobs=params.prompt_logprobs,
            stop_tokens=stop_tokens,
            constraint=self._constraint(params),
            step_by_step=bool(params.stop),
            priority=message.priority,
            deadline=inf if message.deadline_s is None else now + message.deadline_s,
            salt=message.cache_salt or "",
        )
        return Admitted(request, tuple(self._output(params, prompt) for _ in sequences))

    # --- what is asked for -----------------------------------------------------------------------------------------

    def _max_tokens(self, params: SamplingParams, num_prompt: int, capacity: int) -> int:
        wanted = max(1, capacity - num_prompt) if params.max_tokens is None else params.max_tokens
        return min(self.max_model_len - num_prompt, wanted)

    def _filters(self, params: SamplingParams) -> Filters:
        temperature = max(params.temperature, LOWEST_TEMPERATURE) if params.temperature > 0 else 0.0
        return Filters(temperature, min(params.top_k, self.vocab_size), params.top_p, params.min_p)

    def _rules(self, params: SamplingParams, stop_tokens: frozenset[int]) -> SamplerRules:
        """What changes its logits; the default rules change nothing, so that its draws need nothing of the past."""
        held = sorted(stop_tokens) if params.min_tokens > 0 else []
        return SamplerRules(
            penalties=Penalties(params.repetition_penalty, params.presence_penalty, params.frequency_penalty),
            logit_bias=tuple(sorted((token, bias) for token, bias in params.logit_bias.items() if bias)),
            bad_words=self._bad_words(params),
            min_tokens=params.min_tokens if held else 0,
            held_tokens=tuple(held),
        )

    def _stop_tokens(self, params: SamplingParams) -> frozenset[int]:
        """Tokens that end an output. Configurations name end tokens that their model can't draw."""
        named = frozenset[int]() if self.text is None or params.ignore_eos else self.text.eos_tokens
        return frozenset(token for token in named if 0 <= token < self.vocab_size).union(params.stop_token_ids)

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        if not params.bad_words:
            return ()
        assert self.text is not None, "read refuses them without one"
        sequences = spell(params.bad_words, self.text.encode_bare)
        for tokens in sequences:
            check_tokens("bad_words", tokens, self.vocab_size)
        return sequences

    def _constraint(self, params: SamplingParams) -> Constraint | None:
        if params.guide is not None:
            assert self.guides is not None, "read refuses them without a tokenizer"
            return self.guides.compile(params.guide)
        return None if params.allowed_tokens is None else AllowedTokens(params.allowed_tokens, self.vocab_size)

    def _output(self, params: SamplingParams, prompt: tuple[int, ...]) -> OutputText:
        detokenizer = self.text.detokenizer(prompt) if self.text else None
        return OutputText(detokenizer, params.stop, include_stop=params.include_stop, min_tokens=params.min_tokens)

    # --- what is legal ---------------------------------------------------------------------------------------------

    def _check_model(self, model: str | None) -> None:
        require(model in (None, self.model), "model", f"model {model!r} is not served here; {self.model!r} is")

    def _refuse_text(self, params: SamplingParams) -> None:
        """What a model without tokenizer can't do."""
        for name, what in (("stop", "stop strings can't be found"), ("bad_words", "words can't be forbidden")):
            require(not getattr(params, name), name, f"model {self.model!r} has no tokenizer, so {what}")

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
            require(len(message.messages) > 0, field, "messages is empty; it must hold at least 1 message")
            return field, self.text.encode_chat(message.messages)
        assert message.prompt is not None
        return field, self.text.encode(message.prompt)

    def _check_prompt(self, field: str, prompt: tuple[int, ...]) -> None:
        require(len(prompt) > 0, field, f"{field} is empty; it must hold at least 1 token")
        require(
            len(prompt) < self.max_model_len,
            field,
            f"{field} has {len(prompt)} tokens and the model's window is {self.max_model_len}; "
            f"at most {self.max_model_len - 1} leave room for an answer",
        )
        check_tokens(field, (min(prompt), max(prompt)), self.vocab_size)

    def _check_guide(self, params: SamplingParams, guide: Guide) -> None:
        """That it compiles; and that nothing else may forbid the only token that it allows."""
        if self.guides is None:
            reason = f"model {self.model!r} has no tokenizer with an end token, so its text can't be guided"
            raise Rejected("invalid", "guide", reason)
        others = {
            "allowed_tokens": params.allowed_tokens is not None,
            "bad_words": bool(params.bad_words),
            "min_tokens": params.min_tokens > 0,
            "ignore_eos": params.ignore_eos,
        }
        for name, is_given in others.items():
            require(not is_given, name, f"{name} can't be used with a guide, which says itself what may come and end")
        self.guides.compile(guide)

    def _check_choice(self, allowed: tuple[int, ...] | None, rules: SamplerRules) -> None:
        """Whatever came before, a token must be left that can be drawn: a step fails with all that are in it."""
        forbidden = {*rules.held_tokens, *(word[-1] for word in rules.bad_words)}
        choice = range(self.vocab_size) if allowed is None else set(allowed)
        if forbidden and len(choice) <= len(forbidden) and forbidden.issuperset(choice):
            param = "allowed_tokens" if allowed is not None else "bad_words" if rules.bad_words else "min_tokens"
            reason = f"{param} leaves nothing to draw: all allowed tokens may be held back or forbidden"
            raise Rejected("invalid", param, reason)
