"""What is admitted can be served, and what can't is refused with the field, its value and what is legal."""

import struct
from array import array
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from pannier.gateway.admission import Admission, Admitted
from pannier.gateway.allowed_tokens import AllowedTokens
from pannier.gateway.text import Text
from pannier.scheduler import Rejected, Request
from pannier.wire.messages import ChatMessage, Drawn, Filters, Generate, Penalties, SamplerRules, SamplingParams

pytestmark = pytest.mark.timeout(60)
WINDOW = 32


@pytest.fixture
def admission(write_model: Callable[..., Path], tokenizers: dict[str, Tokenizer]) -> Admission:
    tokenizer = tokenizers["byte-level"]
    text = Text.load(write_model(tokenizer))
    return Admission(
        model="ox", text=text, vocab_size=tokenizer.get_vocab_size(), max_model_len=WINDOW, max_sequences=8
    )


@pytest.fixture
def textless() -> Admission:
    return Admission(model="random:ox", text=None, vocab_size=100, max_model_len=WINDOW, max_sequences=200)


def generate(**fields: Any) -> Generate:
    """A request for the prompt "the earth"; fields are the message's or its parameters'."""
    params = SamplingParams(
        **{name: fields.pop(name) for name in list(fields) if name in SamplingParams.__struct_fields__}
    )
    if not {"prompt", "prompt_tokens", "messages"} & fields.keys():
        fields["prompt"] = "the earth"
    nothing = {"model": None, "prompt": None, "prompt_tokens": None, "messages": None}
    return Generate(request="r", params=params, **{**nothing, **fields})


CAPACITY = 10_000
"""Tokens that the cache holds; more than any window here."""
NOW = 100.0
NAN, INFINITE = float("nan"), float("inf")


def admit(admission: Admission, *, capacity: int = CAPACITY, **fields: Any) -> Admitted:
    message = generate(**fields)
    prompt = admission.read(message)
    sequences = range(7, 7 + message.params.n)
    return admission.admit(message, prompt, sequences=sequences, capacity=capacity, now=NOW)


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"max_tokens": 0}, "max_tokens", "max_tokens must be at least 1, not 0"),
        ({"max_tokens": -3}, "max_tokens", "max_tokens must be at least 1, not -3"),
        ({"temperature": 2.5}, "temperature", "temperature must be between 0 and 2, not 2.5"),
        ({"temperature": -1.0}, "temperature", "temperature must be between 0 and 2, not -1"),
        ({"temperature": float("nan")}, "temperature", "temperature must be between 0 and 2, not nan"),
        ({"logprobs": 21}, "logprobs", "logprobs must be between 0 and 20, not 21"),
        ({"logprobs": -1}, "logprobs", "logprobs must be between 0 and 20, not -1"),
        ({"seed": -1}, "seed", "seed must be between 0 and 2^63 - 1, not -1"),
        ({"stop": ("a", "")}, "stop", "stop holds a string of 0 characters; 1 to 1024 are allowed"),
        ({"stop": ("a" * 1025,)}, "stop", "stop holds a string of 1025 characters; 1 to 1024 are allowed"),
        ({"stop": tuple("abcdefghijklmnopq")}, "stop", "stop holds 17 strings; at most 16 are allowed"),
        ({"n": 0}, "n", "n must be between 1 and 8, not 0"),
        ({"n": 9}, "n", "n must be between 1 and 8, not 9"),
        ({"temperature": INFINITE}, "temperature", "temperature must be between 0 and 2, not inf"),
        ({"top_p": 0.0}, "top_p", "top_p must be above 0 and at most 1, not 0"),
        ({"top_p": 1.5}, "top_p", "top_p must be above 0 and at most 1, not 1.5"),
        ({"top_p": NAN}, "top_p", "top_p must be above 0 and at most 1, not nan"),
        ({"top_k": -1}, "top_k", "top_k must be at least 1, or 0 for all tokens, not -1"),
        ({"min_p": -0.5}, "min_p", "min_p must be between 0 and 1, not -0.5"),
        ({"min_p": 1.01}, "min_p", "min_p must be between 0 and 1, not 1.01"),
        ({"min_p": NAN}, "min_p", "min_p must be between 0 and 1, not nan"),
        ({"repetition_penalty": 0.0}, "repetition_penalty", "repetition_penalty must be between 0.01 and 10, not 0"),
        ({"repetition_penalty": 11.0}, "repetition_penalty", "repetition_penalty must be between 0.01 and 10, not 11"),
        ({"repetition_penalty": NAN}, "repetition_penalty", "repetition_penalty must be between 0.01 and 10, not nan"),
        ({"presence_penalty": -2.5}, "presence_penalty", "presence_penalty must be between -2 and 2, not -2.5"),
        ({"presence_penalty": NAN}, "presence_penalty", "presence_penalty must be between -2 and 2, not nan"),
        ({"frequency_penalty": 3.0}, "frequency_penalty", "frequency_penalty must be between -2 and 2, not 3"),
        ({"frequency_penalty": -INFINITE}, "frequency_penalty", "frequency_penalty must be between -2 and 2, not -inf"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias", "logit_bias holds token -1; this model's tokens are 0 to "),
        ({"logit_bias": {3: 101.0}}, "logit_bias", "logit_bias of token 3 must be between -100 and 100, not 101"),
        ({"logit_bias": {3: NAN}}, "logit_bias", "logit_bias of token 3 must be between -100 and 100, not nan"),
        (
            {"logit_bias": dict.fromkeys(range(1025), 1.0)},
            "logit_bias",
            "logit_bias holds 1025 tokens; at most 1024 are allowed",
        ),
        ({"allowed_tokens": ()}, "allowed_tokens", "allowed_tokens is empty; it must hold at least 1 token"),
        ({"allowed_tokens": (1, 9999)}, "allowed_tokens", "allowed_tokens holds token 9999; this model's tokens are"),
        ({"bad_words": ("",)}, "bad_words", "bad_words holds a string of 0 characters; 1 to 256 are allowed"),
        ({"bad_words": ("a" * 257,)}, "bad_words", "bad_words holds a string of 257 characters; 1 to 256 are"),
        ({"bad_words": ("a",) * 129}, "bad_words", "bad_words holds 129 strings; at most 128 are allowed"),
        ({"bad_words": ("  ",)}, "bad_words", "bad_words holds '  ', which this model has no tokens for"),
        ({"min_tokens": -1}, "min_tokens", "min_tokens must be between 0 and 31, not -1"),
        ({"min_tokens": 32}, "min_tokens", "min_tokens must be between 0 and 31, not 32"),
        (
            {"min_tokens": 4, "max_tokens": 3},
            "min_tokens",
            "min_tokens must be between 0 and max_tokens, which is 3, not 4",
        ),
        ({"stop_token_ids": (-1,)}, "stop_token_ids", "stop_token_ids holds token -1; this model's tokens are 0 to "),
        ({"stop_token_ids": (1,) * 129}, "stop_token_ids", "stop_token_ids holds 129 tokens; at most 128 are allowed"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "prompt_logprobs must be between 0 and 20, not 21"),
        ({"prompt_logprobs": -1}, "prompt_logprobs", "prompt_logprobs must be between 0 and 20, not -1"),
        ({"deadline_s": 0.0}, "deadline_s", "deadline_s must be a number of seconds above 0, not 0"),
        ({"deadline_s": NAN}, "deadline_s", "deadline_s must be a number of seconds above 0, not nan"),
        ({"deadline_s": INFINITE}, "deadline_s", "deadline_s must be a number of seconds above 0, not inf"),
        ({"priority": 1 << 31}, "priority", "priority must be between -2147483647 and 2147483647, not 2147483648"),
        ({"cache_salt": ""}, "cache_salt", "cache_salt has 0 characters; 1 to 256 are allowed"),
        ({"cache_salt": "s" * 257}, "cache_salt", "cache_salt has 257 characters; 1 to 256 are allowed"),
        ({"model": "mule"}, "model", "model 'mule' is not served here; 'ox' is"),
        ({"prompt_tokens": ()}, "prompt_tokens", "prompt_tokens is empty; it must hold at least 1 token"),
        ({"messages": ()}, "messages", "messages is empty; it must hold at least 1 message"),
        ({"prompt_tokens": (1, -1)}, "prompt_tokens", "prompt_tokens holds token -1; this model's tokens are 0 to "),
        ({"prompt_tokens": (999, 1)}, "prompt_tokens", "prompt_tokens holds token 999; this model's tokens are 0 to "),
        (
            {"prompt_tokens": (1,) * WINDOW},
            "prompt_tokens",
            "prompt_tokens has 32 tokens and the model's window is 32; at most 31 leave room for an answer",
        ),
        (
            {"prompt": "x", "prompt_tokens": (1,)},
            "prompt",
            "give exactly one of prompt, prompt_tokens and messages, not prompt and prompt_tokens",
        ),
        ({"prompt": None}, "prompt", "give exactly one of prompt, prompt_tokens and messages, not none"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_illegal_requests_are_refused(admission: Admission, fields: dict[str, Any], param: str, reason: str) -> None:
    """One sentence each."""
    with pytest.raises(Rejected) as caught:
        admit(admission, **fields)
    assert (caught.value.code, caught.value.param) == ("invalid", param)
    assert caught.value.reason.startswith(reason)


def test_a_text_too_long_for_the_window_is_refused_with_both_numbers(admission: Admission) -> None:
    """The prompt's tokens and the window."""
    with pytest.raises(Rejected, match=r"^prompt has \d{3} tokens and the model's window is 32;"):
        admit(admission, prompt="the earth " * 60)


def test_max_tokens_is_what_the_window_leaves(admission: Admission) -> None:
    """When it isn't given, and when it is larger."""
    prompt = admit(admission).request.prompt
    assert admit(admission).request.max_tokens == WINDOW - len(prompt)
    assert admit(admission, max_tokens=10_000).request.max_tokens == WINDOW - len(prompt)
    assert admit(admission, max_tokens=3).request.max_tokens == 3


def test_the_longest_prompt_leaves_one_token(textless: Admission) -> None:
    """Prompt and output fill the window exactly."""
    assert admit(textless, prompt_tokens=(1,) * (WINDOW - 1)).request.max_tokens == 1


def test_what_is_asked_for_reaches_the_scheduler(admission: Admission) -> None:
    """Every parameter."""
    assert admission.text is not None
    eos_tokens = admission.text.eos_tokens
    request = admit(
        admission,
        n=2,
        max_tokens=6,
        min_tokens=3,
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={9: 2.0, 8: -1.0, 7: 0.0},
        allowed_tokens=(6, 7, 8),
        seed=11,
        logprobs=20,
        prompt_logprobs=0,
        stop_token_ids=(5,),
        priority=-3,
        deadline_s=2.5,
        cache_salt="mine",
    ).request
    assert isinstance(request.constraint, AllowedTokens)
    assert request == Request(
        sequences=(7, 8),
        prompt=array("i", admission.text.encode("the earth")),
        max_tokens=6,
        filters=Filters(temperature=0.5, top_k=5, top_p=0.9, min_p=0.1),
        rules=SamplerRules(
            penalties=Penalties(1.5, 0.5, -0.5),
            logit_bias=((8, -1.0), (9, 2.0)),
            min_tokens=3,
            held_tokens=tuple(sorted(eos_tokens | {5})),
        ),
        seed=11,
        logprobs=20,
        prompt_logprobs=0,
        stop_tokens=eos_tokens | {5},
        constraint=request.constraint,
        priority=-3,
        deadline=NOW + 2.5,
        salt="mine",
    )


def test_what_needs_nothing_of_the_past_has_no_rules(admission: Admission) -> None:
    """A state would have to be sent and kept for nothing."""
    assert admit(admission, top_k=5, min_tokens=0, logit_bias={3: 0.0}).request.rules is None
    request = admit(admission).request
    assert (request.rules, request.constraint, request.deadline, request.salt) == (None, None, inf, "")


@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
        {"logit_bias": {3: 1.0}},
        {"bad_words": ("void",)},
        {"min_tokens": 1},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_what_changes_logits_has_rules(admission: Admission, fields: dict[str, Any]) -> None:
    """Each parameter by itself."""
    assert admit(admission, **fields).request.rules is not None


def test_end_tokens_are_ignored_on_request(admission: Admission) -> None:
    """The scheduler then knows only those that the request names."""
    assert admit(admission, ignore_eos=True).request.stop_tokens == frozenset()
    request = admit(admission, ignore_eos=True, stop_token_ids=(5,), min_tokens=2).request
    assert request.stop_tokens == {5}
    assert request.rules is not None
    assert request.rules.held_tokens == (5,)


def test_without_a_stop_token_min_tokens_needs_no_rules(textless: Admission) -> None:
    """Nothing ends such an output early."""
    assert admit(textless, prompt_tokens=(1,), min_tokens=3).request.rules is None


def test_end_tokens_that_the_model_can_not_draw_are_left_out(write_model: Any, tokenizers: Any) -> None:
    """A configuration may name one beyond the vocabulary."""
    text = Text.load(write_model(tokenizers["byte-level"], config={"eos_token_id": [3, 1_000_000]}))
    admission = Admission(model="ox", text=text, vocab_size=500, max_model_len=WINDOW, max_sequences=8)
    assert 1_000_000 in text.eos_tokens
    assert 1_000_000 not in admit(admission).request.stop_tokens
    assert 3 in admit(admission).request.stop_tokens


def test_a_temperature_next_to_nothing_is_raised_to_what_can_be_computed(admission: Admission) -> None:
    """0 stays 0: the best token."""
    assert admit(admission, temperature=1e-30).request.filters.temperature == 0.01
    assert admit(admission, temperature=0.0).request.filters.temperature == 0.0


def test_more_likely_tokens_than_there_are_is_all_of_them(admission: Admission) -> None:
    """However large the number is."""
    assert admit(admission, top_k=1 << 60).request.filters.top_k == admission.vocab_size


def test_bad_words_are_forbidden_at_the_start_and_behind_a_space(admission: Admission) -> None:
    """Each as the tokens that spell it; the word's own spaces in front don't count."""
    assert admission.text is not None
    bare, spaced = admission.text.encode_bare("void"), admission.text.encode_bare(" void")
    assert bare != spaced
    for word in ("void", "  void"):
        rules = admit(admission, bad_words=(word, "void")).request.rules
        assert rules is not None
        assert rules.bad_words == (bare, spaced)


def test_allowed_tokens_are_bits_of_whole_words() -> None:
    """Token t is bit t % 32 of the little-endian word t // 32, and the last word is full."""
    tokens = {0, 7, 8, 31, 32, 69}
    mask = AllowedTokens(tokens, vocab_size=70).allowed(array("i"))
    words = struct.unpack("<3I", mask)
    assert {token for token in range(96) if words[token // 32] >> token % 32 & 1} == tokens


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"allowed_tokens": (5, 6), "stop_token_ids": (5, 6), "min_tokens": 1}, "allowed_tokens"),
        ({"allowed_tokens": (5,), "stop_token_ids": (5, 6, 7), "min_tokens": 1}, "allowed_tokens"),
        ({"stop_token_ids": tuple(range(100)), "min_tokens": 1}, "min_tokens"),
    ],
)
def test_a_draw_from_nothing_is_refused(textless: Admission, fields: dict[str, Any], param: str) -> None:
    """What is held back leaves no token; without it there is one."""
    with pytest.raises(Rejected, match=f"{param} leaves nothing to draw") as caught:
        admit(textless, prompt_tokens=(1,), **fields)
    assert caught.value.param == param
    admit(textless, prompt_tokens=(1,), **{**fields, "min_tokens": 0})


def test_bad_words_that_may_leave_nothing_to_draw_are_refused(admission: Admission) -> None:
    """Also a longer one, which forbids its last token only behind the others: it could come to that."""
    assert admission.text is not None
    first, *_, last = admission.text.encode_bare("zvqj")
    assert first != last
    admit(admission, bad_words=("zvqj",), allowed_tokens=(first, last))
    with pytest.raises(Rejected, match="allowed_tokens leaves nothing to draw"):
        admit(admission, bad_words=("zvqj",), allowed_tokens=(last,))


def test_n_is_at_most_128(textless: Admission) -> None:
    """However many sequences may run at once."""
    assert len(admit(textless, prompt_tokens=(1,), n=128).outputs) == 128
    with pytest.raises(Rejected, match="n must be between 1 and 128, not 129"):
        admit(textless, prompt_tokens=(1,), n=129)


def test_every_output_has_a_text_of_its_own(admission: Admission) -> None:
    """They go on independently."""
    admitted = admit(admission, n=2, stop=("void",))
    assert admission.text is not None
    first, second = admitted.outputs
    for token in admission.text.encode_bare("void"):
        first.push(Drawn(7, token, None, ()))
    assert (first.stopped, second.stopped) == (True, False)


def test_stop_strings_forbid_planning_ahead_and_cut_the_text(admission: Admission) -> None:
    """The gateway may finish the request at any token."""
    admitted = admit(admission, stop=("void",))
    assert admitted.request.step_by_step
    assert admission.text is not None
    tokens = admission.text.encode("and void")[1:]
    (output,) = admitted.outputs
    shown = [output.push(Drawn(7, token, None, ())).text for token in tokens]
    assert "".join(shown).strip() == "and"
    assert output.stopped


def test_requests_without_seed_differ(admission: Admission) -> None:
    """Each gets a seed of its own."""
    seeds = {admit(admission).request.seed for _ in range(8)}
    assert len(seeds) == 8
    assert all(0 <= seed < 1 << 63 for seed in seeds)


def test_the_served_model_may_be_named(admission: Admission) -> None:
    """Or left out."""
    assert admit(admission, model="ox").request.prompt == admit(admission, model=None).request.prompt


def test_messages_go_through_the_chat_template(admission: Admission) -> None:
    """And are counted like any prompt."""
    request = admit(admission, messages=(ChatMessage("user", "the earth"),)).request
    assert admission.text is not None
    assert tuple(request.prompt) == admission.text.encode_chat([ChatMessage("user", "the earth")])


@pytest.mark.parametrize("fields", [{"prompt": "x"}, {"messages": (ChatMessage("user", "x"),)}])
def test_a_model_without_tokenizer_takes_tokens_only(textless: Admission, fields: dict[str, Any]) -> None:
    """And says so."""
    (field,) = fields
    with pytest.raises(Rejected, match=f"model 'random:ox' has no tokenizer; send prompt_tokens, not {field}"):
        admit(textless, **fields)


@pytest.mark.parametrize(
    ("field", "reason"), [("stop", "stop strings can't be found"), ("bad_words", "words can't be forbidden")]
)
def test_a_model_without_tokenizer_refuses_what_needs_text(textless: Admission, field: str, reason: str) -> None:
    """There is none to look at."""
    fields: dict[str, Any] = {"prompt_tokens": (1,), field: ("x",)}
    with pytest.raises(Rejected, match=f"no tokenizer, so {reason}") as caught:
        admit(textless, **fields)
    assert caught.value.param == field


def test_a_model_without_tokenizer_gives_tokens_without_text(textless: Admission) -> None:
    """The deltas have tokens and empty text."""
    admitted = admit(textless, prompt_tokens=(1, 2, 3))
    released = admitted.outputs[0].push(Drawn(7, 5, None, ()))
    assert (released.text, released.drawn) == ("", (Drawn(7, 5, None, ()),))
    assert admitted.request.stop_tokens == frozenset()


def test_without_max_tokens_an_output_may_fill_what_the_cache_holds(textless: Admission) -> None:
    """A cache smaller than the window is no reason to refuse a request that asks for no certain length."""
    assert admit(textless, prompt_tokens=(1, 2, 3), capacity=8).request.max_tokens == 5
