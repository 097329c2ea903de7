"""OpenAI's own client is satisfied: answers, streams, log-probabilities, and the errors that it has classes for."""

import asyncio
import json
import math
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Literal

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, Field

from tests.http.conftest import KEY, Front

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
MODEL = "embedded"
FULL = 64
"""Requests that may wait there."""


@pytest.fixture(scope="module")
def client(front: Front) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{front.url}/v1", api_key=KEY, max_retries=0) as made:
        yield made


def test_a_completion_is_what_our_own_client_gets(front: Front, client: OpenAI) -> None:
    """Text, reason and usage."""
    answer = client.completions.create(model=MODEL, prompt="In the beginning", max_tokens=20, temperature=0)
    own = front.client.complete("In the beginning", max_tokens=20, temperature=0.0)
    assert answer.choices[0].text == own.text
    assert answer.choices[0].finish_reason == own.finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (own.usage.prompt_tokens, 20)
    assert answer.model == MODEL


def test_a_stream_joined_is_the_whole(client: OpenAI) -> None:
    """With the usage in a last chunk of its own."""
    asked = {"model": MODEL, "prompt": "And God said", "max_tokens": 30, "temperature": 0}
    whole = client.completions.create(**asked)  # type: ignore[call-overload]  # of several types
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))  # type: ignore[call-overload]
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks[-2:-1]] == ["length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1


def test_the_default_length_of_a_completion_is_openais(client: OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="And", extra_body={"ignore_eos": True})
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


def test_a_chat_whole_and_in_chunks(client: OpenAI) -> None:
    """The first chunk names the role, the last one of a choice the reason."""
    messages = [{"role": "user", "content": [{"type": "text", "text": "Who "}, {"type": "text", "text": "art thou?"}]}]
    asked = {"model": MODEL, "messages": messages, "max_completion_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**asked)  # type: ignore[call-overload]
    chunks = list(client.chat.completions.create(**asked, stream=True))  # type: ignore[call-overload]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert all(chunk.usage is None for chunk in chunks)


def test_several_prompts_and_samples_have_indices_of_their_own(client: OpenAI) -> None:
    """Prompt by prompt; a seed makes them the same again, streamed or not."""
    asked = {"model": MODEL, "prompt": ["In the", "And God"], "n": 2, "max_tokens": 6, "seed": 5, "temperature": 1}
    whole = client.completions.create(**asked)  # type: ignore[call-overload]
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    texts = [""] * 4
    for chunk in client.completions.create(**asked, stream=True):  # type: ignore[call-overload]
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]
    assert len(set(texts)) == 4


def test_chat_log_probabilities_have_tokens_and_bytes(client: OpenAI) -> None:
    """They are those of the text, and the drawn token is the most likely one when nothing is left to chance."""
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hm"}], max_tokens=5, temperature=0, logprobs=True,
        top_logprobs=3,
    )  # fmt: skip
    content = (answer.choices[0].logprobs and answer.choices[0].logprobs.content) or []
    assert len(content) == 5
    text = answer.choices[0].message.content or ""
    assert b"".join(bytes(token.bytes or []) for token in content).decode().strip() == text.strip()
    for token in content:
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].token == token.token
        assert token.logprob == pytest.approx(token.top_logprobs[0].logprob)


def test_an_echo_scores_the_prompt(front: Front, client: OpenAI) -> None:
    """As evaluation programs ask: the sum over a continuation is the same wherever the prompt ends."""
    text = "In the beginning God created the heaven"
    answer = client.completions.create(model=MODEL, prompt=text, max_tokens=0, echo=True, logprobs=1, temperature=0)
    choice = answer.choices[0]
    assert choice.text == text
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0
    assert choice.logprobs is not None
    scores = choice.logprobs.token_logprobs or []
    assert scores[0] is None
    own = front.client.complete(text, max_tokens=1, temperature=0.0, prompt_logprobs=1)
    assert list(scores[1:]) == pytest.approx([each.logprob for each in own.prompt_logprobs])
    tokens = front.client.tokenize(text)
    again = client.completions.create(model=MODEL, prompt=list(tokens), max_tokens=1, echo=True, logprobs=1)
    assert again.choices[0].text.startswith(text)
    assert again.choices[0].logprobs is not None
    assert list((again.choices[0].logprobs.token_logprobs or [])[1 : len(scores)]) == pytest.approx(list(scores[1:]))


def test_what_vllm_offers_beside_works_too(client: OpenAI) -> None:
    """Of its parameters those that mean something here."""
    answer = client.completions.create(
        model=MODEL, prompt="In the", max_tokens=4, temperature=0,
        extra_body={"top_k": 1, "min_p": 0.1, "repetition_penalty": 1.1, "return_token_ids": True, "min_tokens": 4},
    )  # fmt: skip
    extra = answer.choices[0].model_extra or {}
    assert len(extra["token_ids"]) == 4


def test_models_are_listed_and_retrieved(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert (client.models.retrieve(MODEL).model_extra or {})["max_model_len"] == 1024
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.models.retrieve("gpt")


def test_errors_have_the_classes_that_the_client_knows(front: Front, client: OpenAI) -> None:
    """And say which field is wrong."""
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="gpt", prompt="x")
    assert (unknown.value.param, unknown.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.BadRequestError) as wrong:
        client.completions.create(model=MODEL, prompt="x", temperature=9)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=MODEL, prompt=[5] * 2000)
    assert "2000" in long.value.message
    assert "1024" in long.value.message
    with (
        OpenAI(base_url=f"{front.url}/v1", api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()


def test_a_full_house_is_a_429_after_which_the_client_comes_back(front: Front) -> None:
    """With the header that says when; it is served as soon as there is room."""

    def ask(retries: int) -> str:
        with OpenAI(base_url=f"{front.url}/v1", api_key=KEY, max_retries=retries) as client:
            return client.completions.create(model=MODEL, prompt="In the", max_tokens=4).choices[0].text

    crowd = [front.client.stream([5, number], max_tokens=900, ignore_eos=True) for number in range(160)]
    try:
        deadline = time.monotonic() + 30
        while front.client.status()["requests"]["waiting"] < FULL:
            assert time.monotonic() < deadline
        with pytest.raises(openai.RateLimitError) as full:
            ask(0)
        assert full.value.response.headers["retry-after"] == "1"
        with ThreadPoolExecutor(1) as pool:
            patient = pool.submit(ask, 5)
            time.sleep(0.2)  # so that it is turned away first
            for each in crowd:
                each.close()
            assert patient.result()
    finally:
        for each in crowd:
            each.close()


def test_many_at_once_from_the_asynchronous_client(front: Front) -> None:
    """Each gets its own text."""

    async def main() -> None:
        async with AsyncOpenAI(base_url=f"{front.url}/v1", api_key=KEY) as client:

            async def ask(number: int) -> str:
                text = ""
                stream = await client.completions.create(
                    model=MODEL, prompt=f"{number} horses", max_tokens=8, temperature=0, stream=True
                )
                async for chunk in stream:
                    text += chunk.choices[0].text
                return text

            texts = await asyncio.gather(*[ask(number) for number in range(40)])
        for number in (0, 7, 39):
            assert texts[number] == front.client.complete(f"{number} horses", max_tokens=8, temperature=0.0).text

    asyncio.run(main())


def test_no_number_is_infinite(client: OpenAI) -> None:
    """JSON has none: a token that a bias forbids has the least log-probability there is."""
    answer = client.completions.create(
        model=MODEL, prompt="In the", max_tokens=1, temperature=0, logprobs=5, logit_bias={"5": -100}
    )
    assert answer.choices[0].logprobs is not None
    assert all(map(math.isfinite, answer.choices[0].logprobs.token_logprobs or []))


class Horse(BaseModel):
    """What a model is to fill in."""

    color: Literal["white", "red", "black"]
    age: Annotated[int, Field(ge=0, le=40)]
    tame: bool


def test_structured_output_is_parsed(client: OpenAI) -> None:
    """A small model that knows no JSON can't but write it."""
    answer = client.chat.completions.parse(
        model=MODEL, messages=[{"role": "user", "content": "A horse"}], response_format=Horse, max_tokens=300, seed=1
    )
    horse = answer.choices[0].message.parsed
    assert isinstance(horse, Horse)
    assert answer.choices[0].finish_reason == "stop"


def test_several_outputs_have_their_shape_each(client: OpenAI) -> None:
    """By choice, by expression and by grammar; streamed or not."""
    asked = {"model": MODEL, "prompt": "Is it so?", "n": 3, "max_tokens": 20, "temperature": 1, "seed": 3}
    for body in (
        {"structured_outputs": {"choice": ["yea", "nay"]}},
        {"guided_regex": "yea|nay"},
        {"structured_outputs": {"grammar": 'start: "yea" | "nay"'}},
    ):
        whole = client.completions.create(**asked, extra_body=body)  # type: ignore[call-overload]
        assert {choice.text for choice in whole.choices} <= {"yea", "nay"}
        assert {choice.finish_reason for choice in whole.choices} == {"stop"}
    any_object = client.completions.create(
        model=MODEL, prompt="x", max_tokens=900, seed=2, extra_body={"response_format": {"type": "json_object"}}
    )
    if any_object.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(any_object.choices[0].text), dict)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"guided_regex": "(["}, "the regex can't be used"),
        ({"guided_regex": "a", "guided_json": {}}, "both say"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos can't be used with a guide"),
        ({"guided_regex": "a", "min_tokens": 2}, "min_tokens can't be used with a guide"),
        ({"guided_choice": []}, "choice is empty"),
        ({"guided_regex": r"[^\s\S]"}, "no text"),
        ({"guided_grammar": 'start: "a"{100000000}'}, "the grammar can't be followed behind 1 tokens"),
    ],
)
def test_a_shape_that_is_none_is_refused(client: OpenAI, body: dict[str, Any], words: str) -> None:
    with pytest.raises(openai.BadRequestError, match=re.escape(words)):
        client.completions.create(model=MODEL, prompt="x", max_tokens=9, extra_body=body)


def test_a_shape_that_can_not_be_followed_is_an_error_in_mid_stream(client: OpenAI) -> None:
    """And no text that looks finished."""
    body = {"guided_grammar": 'start: "a"{100000000}'}
    stream = client.completions.create(model=MODEL, prompt="x", max_tokens=9, stream=True, extra_body=body)
    with pytest.raises(openai.APIError, match="the grammar can't be followed behind 1 tokens"):
        assert all(choice.finish_reason is None for part in stream for choice in part.choices)
