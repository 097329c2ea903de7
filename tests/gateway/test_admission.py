"""What is admitted can be served, and what can't is refused with the field, its value and what is legal."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from pannier.gateway.admission import Admission, Admitted
from pannier.gateway.text import Text
from pannier.scheduler import Rejected
from pannier.wire.messages import ChatMessage, Drawn, Generate, SamplingParams

pytestmark = pytest.mark.timeout(60)
WINDOW = 32


@pytest.fixture
def admission(write_model: Callable[..., Path], tokenizers: dict[str, Tokenizer]) -> Admission:
    tokenizer = tokenizers["byte-level"]
    text = Text.load(write_model(tokenizer))
    return Admission("ox", text, vocab_size=tokenizer.get_vocab_size(), max_model_len=WINDOW)


@pytest.fixture
def textless() -> Admission:
    return Admission("random:ox", None, vocab_size=100, max_model_len=WINDOW)


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


def admit(admission: Admission, **fields: Any) -> Admitted:
    return admission.admit(generate(**fields), sequence=7, capacity=CAPACITY)


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
    request = admit(admission, temperature=0.5, seed=11, logprobs=20, max_tokens=2).request
    found = dataclasses.asdict(request)
    assert admission.text is not None
    assert found == {
        "sequence": 7,
        "prompt": admission.text.encode("the earth"),
        "max_tokens": 2,
        "temperature": 0.5,
        "seed": 11,
        "logprobs": 20,
        "eos_tokens": admission.text.eos_tokens,
        "step_by_step": False,
    }


def test_end_tokens_are_ignored_on_request(admission: Admission) -> None:
    """The scheduler then knows none."""
    assert admit(admission, ignore_eos=True).request.eos_tokens == frozenset()


def test_stop_strings_forbid_planning_ahead_and_cut_the_text(admission: Admission) -> None:
    """The gateway may finish the request at any token."""
    admitted = admit(admission, stop=("void",))
    assert admitted.request.step_by_step
    assert admission.text is not None
    tokens = admission.text.encode("and void")[1:]
    shown = [admitted.output.push(Drawn(7, token, None, ())).text for token in tokens]
    assert "".join(shown).strip() == "and"
    assert admitted.output.stopped


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
    assert request.prompt == admission.text.encode_chat([ChatMessage("user", "the earth")])


@pytest.mark.parametrize("fields", [{"prompt": "x"}, {"messages": (ChatMessage("user", "x"),)}])
def test_a_model_without_tokenizer_takes_tokens_only(textless: Admission, fields: dict[str, Any]) -> None:
    """And says so."""
    (field,) = fields
    with pytest.raises(Rejected, match=f"model 'random:ox' has no tokenizer; send prompt_tokens, not {field}"):
        admit(textless, **fields)


def test_a_model_without_tokenizer_refuses_stop_strings(textless: Admission) -> None:
    """There is no text to find them in."""
    with pytest.raises(Rejected, match="no tokenizer, so stop strings can't be found") as caught:
        admit(textless, prompt_tokens=(1,), stop=("x",))
    assert caught.value.param == "stop"


def test_a_model_without_tokenizer_gives_tokens_without_text(textless: Admission) -> None:
    """The deltas have tokens and empty text."""
    admitted = admit(textless, prompt_tokens=(1, 2, 3))
    released = admitted.output.push(Drawn(7, 5, None, ()))
    assert (released.text, released.drawn) == ("", (Drawn(7, 5, None, ()),))
    assert admitted.request.eos_tokens == frozenset()


def test_without_max_tokens_an_output_may_fill_what_the_cache_holds(textless: Admission) -> None:
    """A cache smaller than the window is no reason to refuse a request that asks for no certain length."""
    message = generate(prompt=None, prompt_tokens=(1, 2, 3))
    assert textless.admit(message, sequence=7, capacity=8).request.max_tokens == 5
