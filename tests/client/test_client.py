"""The blocking client against a gateway by hand, over real sockets."""

import gc
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import pytest

from pannier.client import (
    ChatMessage,
    Client,
    ClientClosed,
    CompletionOutput,
    Delta,
    ProtocolMismatch,
    ReaderTooSlow,
    RequestFailed,
    TimedOut,
    Unreachable,
    Usage,
)
from pannier.client.inbox import Inbox
from pannier.client.line import Line
from pannier.net import NetError
from pannier.wire import encode
from pannier.wire.messages import (
    Failed,
    Generate,
    Guide,
    GuideKind,
    Message,
    SamplingParams,
    Status,
    TokenLogprob,
    TopLogprob,
)

pytestmark = pytest.mark.timeout(30)


class Gateway(Protocol):
    """The fake of conftest.py."""

    endpoint: str
    received: Any

    def next_request(self) -> Generate: ...
    def next_cancel(self) -> str: ...
    def send(self, *messages: Message) -> None: ...
    def send_frames(self, request: str, frames: list[bytes]) -> None: ...
    def close(self) -> None: ...


def chunk(request: str, text: str) -> Delta:
    return Delta(request, 0, text, (1,), (), (), None, None)


def last(request: str, text: str = "") -> Delta:
    return Delta(request, 0, text, (2,), (), (), "stop", Usage(1, 0, 2))


def test_a_completion_is_the_whole_answer(gateway: Gateway) -> None:
    """Text, tokens, reason and usage."""
    with Client(gateway.endpoint) as client:
        completion = client.complete("in the beginning")
    assert completion.text == "in the beginning"
    assert completion.tokens == (0, 1, 2)
    assert completion.logprobs == ()
    assert completion.finish_reason == "length"
    assert completion.usage == Usage(prompt_tokens=2, cached_tokens=0, completion_tokens=3)


def test_a_stream_gives_the_chunks_as_they_come(gateway: Gateway) -> None:
    """The last one has the reason."""
    with Client(gateway.endpoint) as client:
        chunks = list(client.stream("in the beginning"))
    assert [chunk.text for chunk in chunks] == ["in ", "the ", "beginning"]
    assert [chunk.finish_reason for chunk in chunks] == [None, None, "length"]


def test_tokens_and_their_text_can_be_asked_for(gateway: Gateway) -> None:
    """Of a text and of a conversation; what is neither is refused at once."""
    with Client(gateway.endpoint) as client:
        assert client.tokenize("four") == (0, 1, 2, 3)
        assert client.tokenize([{"role": "user", "content": "hm"}]) == (0,)
        answer = client.detokenize([4, 2])
        assert (answer.text, answer.pieces) == ("42", (b"4", b"2"))
        with pytest.raises(TypeError, match="a message is"):
            client.tokenize([5])  # type: ignore[list-item]  # wrong on purpose


@pytest.mark.parametrize(
    ("prompt", "options"), [("x", {"seed": 1 << 70}), ("x", {"stop": "\ud800"}), ("\ud800", {}), ([1 << 70], {})]
)
def test_what_no_message_can_carry_is_refused_at_once(gateway: Gateway, prompt: Any, options: Any) -> None:
    """And the next request is served."""
    with Client(gateway.endpoint) as client:
        with pytest.raises(TypeError, match="a parameter can't be sent"):
            client.complete(prompt, **options)
        assert client.complete("as before").text == "as before"


def test_who_reads_a_stream_that_another_thread_closes_is_not_left_waiting(quiet: Gateway) -> None:
    """It ends, as if there were no more."""
    with Client(quiet.endpoint) as client, ThreadPoolExecutor(1) as pool:
        stream = client.stream("x")
        request = quiet.next_request().request
        chunks = pool.submit(list, stream)
        stream.close()
        assert chunks.result() == []
        assert quiet.next_cancel() == request


def test_log_probabilities_come_with_their_tokens(quiet: Gateway) -> None:
    """In the order of the tokens."""
    logprobs = tuple(TokenLogprob(token, -0.5, (TopLogprob(token, -0.5),)) for token in (4, 5))
    with Client(quiet.endpoint) as client, ThreadPoolExecutor(1) as pool:
        completion = pool.submit(client.complete, "x", logprobs=1)
        request = quiet.next_request().request
        quiet.send(Delta(request, 0, "a", (4,), logprobs[:1], (), None, None))
        quiet.send(Delta(request, 0, "b", (5,), logprobs[1:], (), "stop", Usage(1, 0, 2)))
        assert completion.result().logprobs == logprobs


EVERY_PARAMETER: dict[str, Any] = {
    "max_tokens": 3,
    "min_tokens": 2,
    "n": 4,
    "temperature": 0,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "repetition_penalty": 1.2,
    "presence_penalty": -0.5,
    "frequency_penalty": 0.5,
    "logit_bias": {7: -1},
    "allowed_tokens": [7, 8],
    "bad_words": ["c", "d"],
    "seed": 7,
    "logprobs": 2,
    "prompt_logprobs": 1,
    "stop": ["a", "b"],
    "stop_token_ids": [9],
    "include_stop": True,
    "ignore_eos": True,
    "guide": Guide(GuideKind.REGEX, "a+"),
}


def test_every_parameter_reaches_the_gateway(quiet: Gateway) -> None:
    """As it was written, lists as tuples."""
    assert list(EVERY_PARAMETER) == list(SamplingParams.__struct_fields__)
    with Client(quiet.endpoint) as client, client.stream("x", model="ox", **EVERY_PARAMETER):
        message = quiet.next_request()
    assert (message.model, message.prompt, message.prompt_tokens, message.messages) == ("ox", "x", None, None)
    for name, value in EVERY_PARAMETER.items():
        assert getattr(message.params, name) == (tuple(value) if isinstance(value, list) else value)


def test_what_concerns_the_request_as_a_whole_reaches_the_gateway(quiet: Gateway) -> None:
    """Beside its parameters; what is left out is the message's own default."""
    with Client(quiet.endpoint) as client:
        with client.stream("x", priority=-3, deadline_s=2, cache_salt="mine"):
            message = quiet.next_request()
        with client.chat_stream([{"role": "user", "content": "a"}]):
            quiet.next_cancel()
            plain = quiet.next_request()
    assert (message.priority, message.deadline_s, message.cache_salt) == (-3, 2.0, "mine")
    assert (plain.priority, plain.deadline_s, plain.cache_salt) == (0, None, None)


def test_several_outputs_come_apart_by_their_index(quiet: Gateway) -> None:
    """The answer ends with the usage, not with the first output that has ended; the first one is at hand."""
    second = (TokenLogprob(8, -0.25, ()),)
    with Client(quiet.endpoint) as client, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.complete, "x", n=2)
        request = quiet.next_request().request
        quiet.send(
            Delta(request, 0, "a", (4,), (), (), None, None),
            Delta(request, 1, "c", (8,), second, (), "stop", None),
            Delta(request, 0, "b", (5,), (), (), "length", Usage(1, 0, 3)),
        )
        completion = answer.result()
    assert completion.outputs == (
        CompletionOutput("ab", (4, 5), (), "length"),
        CompletionOutput("c", (8,), second, "stop"),
    )
    assert (completion.text, completion.tokens, completion.finish_reason) == ("ab", (4, 5), "length")
    assert completion.usage.completion_tokens == 3


def test_a_stream_of_several_outputs_says_whose_each_chunk_is(quiet: Gateway) -> None:
    """And goes on until the last of them has ended."""
    with Client(quiet.endpoint) as client:
        stream = client.stream("x", n=2)
        request = quiet.next_request().request
        quiet.send(
            Delta(request, 1, "c", (8,), (), (), "stop", None),
            Delta(request, 0, "a", (4,), (), (), "length", Usage(1, 0, 2)),
        )
        assert [(chunk.index, chunk.text, chunk.finish_reason) for chunk in stream] == [
            (1, "c", "stop"),
            (0, "a", "length"),
        ]


def test_log_probabilities_of_the_prompt_are_joined(quiet: Gateway) -> None:
    """They come in as many chunks as the prompt was computed in."""
    prompt = tuple(TokenLogprob(token, -0.5, ()) for token in (4, 5, 6))
    with Client(quiet.endpoint) as client, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.complete, "x", prompt_logprobs=0)
        request = quiet.next_request().request
        quiet.send(Delta(request, 0, "", (), (), prompt[:2], None, None))
        quiet.send(Delta(request, 0, "b", (5,), (), prompt[2:], "stop", Usage(4, 0, 1)))
        assert answer.result().prompt_logprobs == prompt
        assert answer.result().text == "b"


def test_a_deadline_that_has_passed_has_a_code_of_its_own(quiet: Gateway) -> None:
    """So that a caller can tell it from a refusal."""
    with Client(quiet.endpoint) as client:
        stream = client.stream("x", deadline_s=0.5)
        quiet.send(Failed(quiet.next_request().request, "timeout", None, "its deadline has passed"))
        with pytest.raises(RequestFailed, match="its deadline has passed") as caught:
            next(stream)
    assert caught.value.code == "timeout"


def test_a_prompt_may_be_tokens(quiet: Gateway) -> None:
    """And one stop string or bad word need not be a list."""
    with Client(quiet.endpoint) as client, client.stream([5, 6], stop="end", bad_words="ox"):
        message = quiet.next_request()
    assert (message.prompt, message.prompt_tokens) == (None, (5, 6))
    assert message.params == SamplingParams(stop=("end",), bad_words=("ox",))


def test_a_conversation_may_be_plain_dictionaries(quiet: Gateway) -> None:
    """Or the messages themselves."""
    with (
        Client(quiet.endpoint) as client,
        client.chat_stream([{"role": "user", "content": "a"}, ChatMessage("model", "b")]),
    ):
        message = quiet.next_request()
    assert message.messages == (ChatMessage("user", "a"), ChatMessage("model", "b"))
    assert (message.prompt, message.prompt_tokens) == (None, None)


def test_chat_is_the_whole_answer(quiet: Gateway) -> None:
    """As a completion is."""
    with Client(quiet.endpoint) as client, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.chat, [{"role": "user", "content": "a"}])
        quiet.send(last(quiet.next_request().request, "b"))
        assert answer.result().text == "b"


def test_the_status_is_plain_data(gateway: Gateway) -> None:
    """As the gateway sent it."""
    with Client(gateway.endpoint) as client:
        assert client.status() == {"model": "ox"}


@pytest.mark.parametrize(
    "wrong",
    [
        lambda client: client.stream("x", max_tokens="3"),
        lambda client: client.stream("x", max_token=3),
        lambda client: client.stream("x", stop=[1]),
        lambda client: client.stream("x", logit_bias={"a": 1}),
        lambda client: client.stream("x", priority="high"),
        lambda client: client.stream([1.5]),
        lambda client: client.stream(None),
        lambda client: client.chat_stream([{"role": "user"}]),
        lambda client: client.chat_stream(["hello"]),
    ],
    ids=["type", "unknown", "stop", "bias", "priority", "token", "prompt", "no content", "no message"],
)
def test_what_no_gateway_could_read_is_refused_here(gateway: Gateway, wrong: Callable[[Client], object]) -> None:
    """It would be dropped there unread."""
    with Client(gateway.endpoint) as client, pytest.raises(TypeError):
        wrong(client)


def test_two_streams_share_the_connection(quiet: Gateway) -> None:
    """Each gets its own chunks, whatever the order in which they come and are read."""
    with Client(quiet.endpoint) as client:
        first, second = client.stream("a"), client.stream("b")
        one, two = quiet.next_request().request, quiet.next_request().request
        quiet.send(chunk(two, "B1"), chunk(one, "A1"), last(two, "B2"), last(one, "A2"))
        assert [chunk.text for chunk in second] == ["B1", "B2"]
        assert [chunk.text for chunk in first] == ["A1", "A2"]


def test_many_threads_share_a_client(gateway: Gateway) -> None:
    """Every thread gets its own answers."""
    prompts = [f"prompt {number} of many" for number in range(200)]
    with Client(gateway.endpoint) as client, ThreadPoolExecutor(8) as pool:
        assert [completion.text for completion in pool.map(client.complete, prompts)] == prompts


def test_leaving_a_loop_cancels(quiet: Gateway) -> None:
    """With nothing but `break`."""
    with Client(quiet.endpoint) as client:
        stream = client.stream("x")
        request = quiet.next_request().request
        quiet.send(chunk(request, "a"), chunk(request, "b"))
        for _ in stream:
            break
        del stream
        gc.collect()
        assert quiet.next_cancel() == request


def test_an_error_in_the_body_cancels(quiet: Gateway) -> None:
    """The stream is a context manager."""

    def fail_with_an_open_stream(client: Client) -> None:
        with client.stream("x"):
            quiet.next_request()
            raise ZeroDivisionError

    with Client(quiet.endpoint) as client:
        with pytest.raises(ZeroDivisionError):
            fail_with_an_open_stream(client)
        quiet.next_cancel()


def test_a_closed_stream_has_no_more_chunks(quiet: Gateway) -> None:
    """Closing again is fine."""
    with Client(quiet.endpoint) as client:
        stream = client.stream("x")
        request = quiet.next_request().request
        stream.close()
        stream.close()
        assert list(stream) == []
        assert quiet.next_cancel() == request


def test_a_stream_that_has_ended_is_not_cancelled(gateway: Gateway) -> None:
    """Nothing is sent that means nothing."""
    with Client(gateway.endpoint) as client:
        with client.stream("a b") as stream:
            list(stream)
        del stream
        client.status()
    assert gateway.next_request().prompt == "a b"
    assert gateway.received.empty()


def test_late_chunks_of_a_cancelled_request_are_dropped(quiet: Gateway) -> None:
    """The next request is not disturbed."""
    with Client(quiet.endpoint) as client:
        with client.stream("x"):
            cancelled = quiet.next_request().request
        quiet.next_cancel()
        stream = client.stream("y")
        request = quiet.next_request().request
        quiet.send(chunk(cancelled, "late"), last(request, "y"))
        assert [chunk.text for chunk in stream] == ["y"]


def test_a_refusal_is_an_error_with_code_and_field(quiet: Gateway) -> None:
    """And the gateway's own sentence."""
    with Client(quiet.endpoint) as client:
        stream = client.stream("x")
        quiet.send(
            Failed(quiet.next_request().request, "invalid", "max_tokens", "max_tokens must be at least 1, not 0")
        )
        with pytest.raises(RequestFailed, match=r"^max_tokens must be at least 1, not 0$") as caught:
            next(stream)
        assert (caught.value.code, caught.value.param) == ("invalid", "max_tokens")
        assert list(stream) == []


def test_a_failure_in_mid_stream_comes_after_the_chunks(quiet: Gateway) -> None:
    """What came before it can be read."""
    with Client(quiet.endpoint) as client:
        stream = client.stream("x")
        request = quiet.next_request().request
        quiet.send(chunk(request, "a"), Failed(request, "internal", None, "the group was lost"))
        assert next(stream).text == "a"
        with pytest.raises(RequestFailed, match="the group was lost"):
            next(stream)


def test_nothing_at_the_endpoint_is_unreachable(tmp_path: Path) -> None:
    """The error names it."""
    nowhere = f"ipc://{tmp_path}/nothing"
    with Client(nowhere, connect_timeout_s=0.1) as client, pytest.raises(Unreachable, match=f"^{nowhere} ") as caught:
        client.complete("x")
    assert caught.value.endpoint == nowhere


def test_something_else_at_the_endpoint_is_unreachable() -> None:
    """A port that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        endpoint = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        with Client(endpoint, connect_timeout_s=0.1) as client, pytest.raises(Unreachable):
            client.status()


def test_a_gateway_may_start_after_the_request(ipc: str, make_gateway: Callable[[str], Gateway]) -> None:
    """The request waits for it, as long as the client allows."""
    with Client(ipc, connect_timeout_s=20) as client:
        stream = client.stream("a b")
        make_gateway(ipc)
        assert "".join(chunk.text for chunk in stream) == "a b"


def test_a_gateway_that_goes_ends_its_requests(quiet: Gateway) -> None:
    """At once, with what it had sent."""
    with Client(quiet.endpoint) as client:
        stream = client.stream("x")
        quiet.send(chunk(quiet.next_request().request, "a"))
        quiet.close()
        assert next(stream).text == "a"
        with pytest.raises(Unreachable, match="the gateway has gone"):
            next(stream)


def test_the_last_words_of_a_gateway_are_heard(quiet: Gateway) -> None:
    """An answer that was sent whole arrives whole, although its sender has gone."""
    with Client(quiet.endpoint) as client:
        streams = [client.stream("x") for _ in range(20)]
        for _ in streams:
            request = quiet.next_request().request
            quiet.send(chunk(request, "a"), last(request, "b"))
        quiet.close()
        assert [[chunk.text for chunk in stream] for stream in streams] == [["a", "b"]] * 20


def test_a_gateway_that_comes_back_is_found(ipc: str, make_gateway: Callable[[str], Gateway]) -> None:
    """By the same client; that the first one has gone it may hear only while it asks the second."""
    with Client(ipc, connect_timeout_s=20, retries=3) as client:
        first = make_gateway(ipc)
        assert client.complete("one").text == "one"
        first.close()
        make_gateway(ipc)
        assert client.complete("two").text == "two"


def test_a_request_that_was_never_sent_is_not_cancelled(ipc: str, make_gateway: Callable[[str], Gateway]) -> None:
    """A gateway that starts later hears of the later request only."""
    with Client(ipc, connect_timeout_s=20) as client:
        client.stream("given up").close()
        gateway = make_gateway(ipc)
        assert client.complete("two").text == "two"
        assert gateway.next_request().prompt == "two"
        assert gateway.received.empty()


def test_an_answer_that_takes_too_long_is_cancelled(quiet: Gateway) -> None:
    """`timeout_s` is for the whole of it."""
    with Client(quiet.endpoint) as client:
        stream = client.stream("x", timeout_s=0.1)
        request = quiet.next_request().request
        with pytest.raises(TimedOut, match=r"longer than 0\.1 s"):
            next(stream)
        assert quiet.next_cancel() == request


def test_closing_the_client_ends_and_cancels_its_requests(quiet: Gateway) -> None:
    """The reader, in another thread, is told."""
    client = Client(quiet.endpoint)
    with ThreadPoolExecutor(1) as pool:
        completion = pool.submit(client.complete, "x")
        request = quiet.next_request().request
        client.close()
        with pytest.raises(ClientClosed):
            completion.result()
    assert quiet.next_cancel() == request


def test_a_closed_client_takes_no_requests(gateway: Gateway) -> None:
    """Closing again is fine."""
    client = Client(gateway.endpoint)
    client.close()
    client.close()
    with pytest.raises(ClientClosed):
        client.complete("x")


def test_a_client_that_is_dropped_says_so_and_ends_its_thread(gateway: Gateway) -> None:
    """Which the fixture of all these tests sees."""
    clients = [Client(gateway.endpoint)]
    clients[0].status()
    with pytest.warns(ResourceWarning, match="a client was not closed"):
        clients.clear()


def test_a_stream_keeps_the_connection_of_a_dropped_client(gateway: Gateway) -> None:
    """The answer is read to its end."""
    streams = [Client(gateway.endpoint).stream("a b c")]
    gc.collect()
    assert "".join(chunk.text for chunk in streams[0]) == "a b c"
    with pytest.warns(ResourceWarning, match="a client was not closed"):
        streams.clear()


def test_another_protocol_is_recognised(quiet: Gateway) -> None:
    """Rather than waited for."""
    with Client(quiet.endpoint) as client:
        stream = client.stream("x")
        quiet.send_frames(quiet.next_request().request, [b"HTTP/1.1 200 OK"])
        with pytest.raises(ProtocolMismatch, match=f"^{quiet.endpoint} is no gateway of this version"):
            next(stream)


def test_a_reader_that_stops_reading_is_cancelled(quiet: Gateway) -> None:
    """What it had not read stays readable, then it is told."""
    line = Line(quiet.endpoint, connect_timeout_s=5, insecure=False)
    came = threading.Semaphore(0)
    inbox = Inbox(came.release, max_unread=2)
    line.ask(Generate("r", None, "x", None, None, SamplingParams()), inbox)
    quiet.next_request()
    quiet.send(*(chunk("r", str(number)) for number in range(5)))
    assert quiet.next_cancel() == "r"
    line.close()
    for expected in "01":
        answer = inbox.take()
        assert isinstance(answer, Delta)
        assert answer.text == expected
    with pytest.raises(ReaderTooSlow):
        inbox.take()
    assert inbox.take() is None


@pytest.mark.parametrize("endpoint", ["tcp://192.0.2.1:5151", "http://127.0.0.1:80", "nonsense"])
def test_endpoints_that_are_none_or_exposed_are_refused(endpoint: str) -> None:
    """When the client is made."""
    with pytest.raises(NetError):
        Client(endpoint)


@pytest.mark.slow
def test_the_client_imports_nothing_heavy() -> None:
    """It is the base install, and starts in a blink."""
    heavy = ["torch", "transformers", "tokenizers", "numpy", "pydantic", "structlog", "typer", "rich"]
    program = (
        f"import sys; sys.path[:] = {sys.path!r}; import pannier.client; print(*set(sys.modules) & set({heavy!r}))"
    )
    found = subprocess.run(
        [sys.executable, "-I", "-c", program], check=True, capture_output=True, text=True, timeout=20
    )
    assert found.stdout.split() == []


@pytest.mark.slow
def test_a_program_that_forgets_to_close_still_ends(gateway: Gateway) -> None:
    """With an open stream, even."""
    program = (
        f"import sys; sys.path[:] = {sys.path!r}; from pannier.client import Client; "
        f"client = Client({gateway.endpoint!r}); stream = client.stream('a b'); print(next(stream).text)"
    )
    ended = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=20)
    assert ended.stdout == "a \n"


def test_answers_to_nobody_are_dropped(quiet: Gateway) -> None:
    """A status that nobody waits for disturbs nothing."""
    with Client(quiet.endpoint) as client:
        stream = client.stream("x")
        request = quiet.next_request().request
        quiet.send(chunk(request, "a"))
        quiet.send_frames(request, [bytes(frame) for frame in encode(Status("nobody", {}))])
        quiet.send(last(request, "b"))
        assert "".join(chunk.text for chunk in stream) == "ab"
