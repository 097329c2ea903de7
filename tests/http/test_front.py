"""What is promised beside OpenAI's API: fields refused, clients that leave, health, metrics, guards."""

import json
import socket
import time
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlparse

import httpx
import pytest

from tests.http.conftest import KEY, Front

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
AUTHORIZED = {"Authorization": f"Bearer {KEY}"}


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("completions", {"prompt": "x", "nope": 1}, "nope", "no parameter"),
        ("completions", {}, "prompt", "missing"),
        ("completions", {"prompt": "x", "max_tokens": "5"}, "max_tokens", "'5'"),
        ("completions", {"prompt": "x", "suffix": "y"}, "suffix", "not supported"),
        ("completions", {"prompt": "x", "best_of": 3}, "best_of", "not supported"),
        ("completions", {"prompt": []}, "prompt", "0 prompts"),
        ("completions", {"prompt": "x", "stream_options": {}}, "stream_options", "needs stream"),
        ("completions", {"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias", "token ids"),
        ("completions", {"prompt": "x", "logit_bias": {"--5": 1}}, "logit_bias", "token ids"),
        ("completions", {"prompt": "x", "logit_bias": {"9" * 5000: 1}}, "logit_bias", "token ids"),
        ("completions", {"prompt": 5}, "prompt", "a list of token ids, or a list of such lists"),
        ("completions", {"prompt": ["a", 1]}, "prompt", "is ['a', 1]: it must be a text, a list of texts"),
        ("completions", {"prompt": [[1], "a"]}, "prompt", "is [[1], 'a']: it must be a text, a list of texts"),
        ("completions", {"prompt": "x", "guided_json": 5}, "guided_json", "is 5"),
        ("completions", {"prompt": "x", "max_tokens": 0}, "max_tokens", "at least 1"),
        ("completions", {"prompt": "x", "top_p": 0}, "top_p", "above 0"),
        ("completions", {"prompt": "x" * 9000}, "prompt", "1024"),
        ("chat/completions", {"messages": []}, "messages", "at least 1"),
        ("chat/completions", {"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "is 5"),
        (
            "chat/completions",
            {"messages": [{"role": "user"}], "tools": [{"type": "function"}]},
            "tools",
            "not supported",
        ),
        ("chat/completions", {"messages": [{"role": "user"}], "top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        ("chat/completions", {"messages": [{"role": "a"}], "response_format": {"type": "x"}}, None, "response_format"),
        (
            "chat/completions",
            {"messages": [{"role": "a"}], "response_format": {"type": "json_schema"}},
            "response_format.json_schema",
            "needs a json_schema",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_mistake_gets_a_400_that_names_the_field(
    front: Front, path: str, body: dict[str, Any], param: str | None, words: str, stream: bool
) -> None:
    """Also where a stream was asked for: nothing of it has begun."""
    if stream and "stream_options" in body:
        pytest.skip("right with a stream")
    answer = front.post(f"/v1/{path}", **body, **({"stream": True} if stream else {}))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "BadRequestError"
    if param is not None:
        assert error["param"] == param
    assert words in error["message"] or words in str(error["param"])


def test_fields_that_change_nothing_are_taken(front: Front) -> None:
    answer = front.post(
        "/v1/chat/completions", messages=[{"role": "user", "content": "x"}], max_tokens=1, user="me", store=False,
        metadata={"a": "b"}, tools=[], tool_choice="none", response_format={"type": "text"}, top_k=-1, best_of=1,
    )  # fmt: skip
    assert answer.status_code == 200, answer.text


def test_a_client_that_leaves_a_stream_gives_its_blocks_back(front: Front) -> None:
    """Within a second, for each of many that leave at once."""
    with ExitStack() as stack:
        leavers = [stack.enter_context(_begin_stream(front, f"leaver {number}")) for number in range(8)]
        for leaver in leavers:
            received = b""
            while b"data: " not in received:
                received += leaver.recv(65536)
    front.wait_until_blocks_return(1.0)


def test_a_client_that_leaves_before_its_whole_answer_gives_its_blocks_back(front: Front) -> None:
    """Nobody would read it."""
    with _begin_stream(front, "a long one", stream=False):
        deadline = time.monotonic() + 10
        while not front.client.status()["requests"]["running"]:
            assert time.monotonic() < deadline
    front.wait_until_blocks_return(1.0)


def _begin_stream(front: Front, prompt: str, *, stream: bool = True) -> socket.socket:
    """A request for as much text as there can be, as bytes on a socket."""
    url = urlparse(front.url)
    assert url.port is not None
    body = json.dumps({"prompt": prompt, "max_tokens": 900, "ignore_eos": True, "stream": stream}).encode()
    made = socket.create_connection((url.hostname, url.port), timeout=30)
    fields = f"Host: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {len(body)}"
    made.sendall(f"POST /v1/completions HTTP/1.1\r\n{fields}\r\n\r\n".encode() + body)
    return made


def test_health_needs_no_key_and_everything_else_does(front: Front) -> None:
    for path in ("/livez", "/readyz", "/health", "/ping"):
        assert httpx.get(front.url + path, timeout=30).status_code == 200
    for path in ("/v1/models", "/metrics", "/status", "/version", "/nowhere"):
        refused = httpx.get(front.url + path, timeout=30)
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
    assert front.get("/version").json()["version"]
    assert front.get("/status").json()["ready"]
    assert front.get("/nowhere").status_code == 404
    assert front.get("/v1/completions").status_code == 405


def test_a_body_that_is_too_large_is_not_read(front: Front) -> None:
    """Whether it says so or not."""
    said = httpx.post(f"{front.url}/v1/completions", content=b"x" * (9 << 20), headers=AUTHORIZED, timeout=60)
    assert said.status_code == 413
    unsaid = httpx.post(
        f"{front.url}/v1/completions", content=(b"x" * (1 << 20) for _ in range(9)), headers=AUTHORIZED, timeout=60
    )
    assert unsaid.status_code == 413


def test_requests_keep_their_id_and_pages_of_one_origin_may_ask(front: Front) -> None:
    named = httpx.get(f"{front.url}/version", headers={**AUTHORIZED, "X-Request-Id": "mine"}, timeout=30)
    assert named.headers["x-request-id"] == "mine"
    assert front.get("/version").headers["x-request-id"]
    asked = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    allowed = httpx.options(f"{front.url}/v1/completions", headers=asked, timeout=30)
    assert allowed.headers["access-control-allow-origin"] == "https://a.example"
    foreign = httpx.options(f"{front.url}/v1/completions", headers={**asked, "Origin": "https://b.example"}, timeout=30)
    assert "access-control-allow-origin" not in foreign.headers


def test_tokens_and_back(front: Front) -> None:
    tokens = front.post("/tokenize", prompt="In the beginning", return_token_strs=True).json()
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    assert front.post("/detokenize", tokens=tokens["tokens"]).json() == {"prompt": "In the beginning"}
    assert front.post("/tokenize").status_code == 400


VLLM_NAMES = {
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
    "vllm:num_preemptions_total", "vllm:prompt_tokens_total", "vllm:prompt_tokens_cached_total",
    "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total",
    "vllm:generation_tokens_total", "vllm:request_success_total", "vllm:time_to_first_token_seconds_bucket",
    "vllm:inter_token_latency_seconds_bucket", "vllm:e2e_request_latency_seconds_bucket",
    "vllm:request_time_per_output_token_seconds_bucket", "vllm:request_prompt_tokens_bucket",
    "vllm:request_generation_tokens_bucket",
}  # fmt: skip


def test_metrics_have_the_names_that_dashboards_know(front: Front) -> None:
    """And count what was asked for."""
    before = _metrics(front)
    front.post("/v1/completions", prompt="In the", max_tokens=5, ignore_eos=True)
    after = _metrics(front)
    assert {name.partition("{")[0] for name in after} >= VLLM_NAMES
    labels = '{engine="0",model_name="embedded"}'
    assert after[f"vllm:generation_tokens_total{labels}"] - before[f"vllm:generation_tokens_total{labels}"] == 5
    assert after[f"vllm:time_to_first_token_seconds_count{labels}"] > 0
    assert any(name.startswith("pannier_lane_seconds") and 'part="exposed_transfer"' in name for name in after)


def _metrics(front: Front) -> dict[str, float]:
    lines = [line for line in front.get("/metrics").text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}
