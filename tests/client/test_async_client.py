"""The asyncio client against a gateway by hand, over real sockets."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pytest

from pannier.client import AsyncClient, AsyncStream, ClientClosed, Delta, RequestFailed, TimedOut, Unreachable, Usage
from pannier.wire.messages import ChatMessage, Failed, Generate, Message

pytestmark = pytest.mark.timeout(30)
T = TypeVar("T")


class Gateway(Protocol):
    """The fake of conftest.py."""

    endpoint: str
    received: Any

    def next_request(self) -> Generate: ...
    def next_cancel(self) -> str: ...
    def send(self, *messages: Message) -> None: ...
    def close(self) -> None: ...


def chunk(request: str, text: str) -> Delta:
    return Delta(request, 0, text, (1,), (), (), None, None)


def last(request: str, text: str = "") -> Delta:
    return Delta(request, 0, text, (2,), (), (), "stop", Usage(1, 0, 2))


async def wait_for(call: Callable[[], T]) -> T:
    """What a blocking call of the fake gives; the loop goes on meanwhile."""
    with ThreadPoolExecutor(1) as pool:
        return await asyncio.get_running_loop().run_in_executor(pool, call)


def run(endpoint: str, main: Callable[[AsyncClient], Awaitable[None]], connect_timeout_s: float = 5) -> None:
    """Run `main` with a client, in a loop that shows its mistakes."""

    async def with_client() -> None:
        async with AsyncClient(endpoint, connect_timeout_s=connect_timeout_s) as client:
            await main(client)

    asyncio.run(with_client(), debug=True)


@asynccontextmanager
async def background(work: Awaitable[T]) -> AsyncIterator["asyncio.Future[T]"]:
    """A task that has ended when the block has."""
    task = asyncio.ensure_future(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_a_completion_is_the_whole_answer(gateway: Gateway) -> None:
    """Text, tokens, reason and usage."""

    async def main(client: AsyncClient) -> None:
        completion = await client.complete("in the beginning")
        assert (completion.text, completion.tokens) == ("in the beginning", (0, 1, 2))
        assert (completion.finish_reason, completion.usage.completion_tokens) == ("length", 3)

    run(gateway.endpoint, main)


def test_a_stream_gives_the_chunks_as_they_come(gateway: Gateway) -> None:
    """The last one has the reason."""

    async def main(client: AsyncClient) -> None:
        chunks = [chunk async for chunk in client.stream("in the beginning")]
        assert [chunk.text for chunk in chunks] == ["in ", "the ", "beginning"]
        assert chunks[-1].finish_reason == "length"

    run(gateway.endpoint, main)


def test_several_outputs_end_with_the_usage(quiet: Gateway) -> None:
    """Not with the first of them that has ended."""

    async def main(client: AsyncClient) -> None:
        stream = client.stream("x", n=2)
        request = (await wait_for(quiet.next_request)).request
        quiet.send(Delta(request, 1, "c", (8,), (), (), "stop", None), last(request, "a"))
        assert [(chunk.index, chunk.text) async for chunk in stream] == [(1, "c"), (0, "a")]

    run(quiet.endpoint, main)


def test_chat_is_the_whole_answer(quiet: Gateway) -> None:
    """As a completion is."""

    async def main(client: AsyncClient) -> None:
        async with background(client.chat([{"role": "user", "content": "a"}])) as answer:
            message = await wait_for(quiet.next_request)
            assert message.messages == (ChatMessage("user", "a"),)
            quiet.send(last(message.request, "b"))
            assert (await answer).text == "b"

    run(quiet.endpoint, main)


def test_the_status_is_plain_data(gateway: Gateway) -> None:
    """As the gateway sent it."""

    async def main(client: AsyncClient) -> None:
        assert await client.status() == {"model": "ox"}

    run(gateway.endpoint, main)


def test_tokens_and_their_text_can_be_asked_for(gateway: Gateway) -> None:
    """There and back."""

    async def main(client: AsyncClient) -> None:
        assert await client.tokenize("four") == (0, 1, 2, 3)
        assert (await client.detokenize([4, 2])).text == "42"

    run(gateway.endpoint, main)


def test_many_requests_share_the_connection(gateway: Gateway) -> None:
    """Each gets its own answer."""
    prompts = [f"prompt {number} of many" for number in range(300)]

    async def main(client: AsyncClient) -> None:
        completions = await asyncio.gather(*(client.complete(prompt) for prompt in prompts))
        assert [completion.text for completion in completions] == prompts

    run(gateway.endpoint, main)


def test_two_streams_share_the_connection(quiet: Gateway) -> None:
    """Whatever the order in which their chunks come and are read."""

    async def main(client: AsyncClient) -> None:
        first, second = client.stream("a"), client.stream("b")
        one, two = (await wait_for(quiet.next_request)).request, (await wait_for(quiet.next_request)).request
        quiet.send(chunk(two, "B1"), chunk(one, "A1"), last(two, "B2"), last(one, "A2"))
        assert [chunk.text async for chunk in second] == ["B1", "B2"]
        assert [chunk.text async for chunk in first] == ["A1", "A2"]

    run(quiet.endpoint, main)


def test_cancelling_the_task_cancels_the_request(quiet: Gateway) -> None:
    """While it waits for the next chunk."""

    async def main(client: AsyncClient) -> None:
        async with background(client.complete("x")) as completion:
            request = (await wait_for(quiet.next_request)).request
            completion.cancel()
            with pytest.raises(asyncio.CancelledError):
                await completion
            assert await wait_for(quiet.next_cancel) == request

    run(quiet.endpoint, main)


def test_leaving_a_loop_cancels(quiet: Gateway) -> None:
    """With nothing but `break`."""

    async def main(client: AsyncClient) -> None:
        stream = client.stream("x")
        request = (await wait_for(quiet.next_request)).request
        quiet.send(chunk(request, "a"))
        async for _ in stream:
            break
        del stream
        assert await wait_for(quiet.next_cancel) == request

    run(quiet.endpoint, main)


def test_leaving_the_block_cancels(quiet: Gateway) -> None:
    """And leaves no more chunks."""

    async def main(client: AsyncClient) -> None:
        async with client.stream("x") as stream:
            request = (await wait_for(quiet.next_request)).request
        assert await wait_for(quiet.next_cancel) == request
        assert [chunk async for chunk in stream] == []

    run(quiet.endpoint, main)


def test_who_reads_a_stream_that_another_task_closes_is_not_left_waiting(quiet: Gateway) -> None:
    """It ends, as if there were no more."""

    async def read(stream: AsyncStream) -> list[str]:
        return [each.text async for each in stream]

    async def main(client: AsyncClient) -> None:
        stream = client.stream("x")
        async with background(read(stream)) as texts:
            request = (await wait_for(quiet.next_request)).request
            stream.close()
            assert await texts == []
            assert await wait_for(quiet.next_cancel) == request

    run(quiet.endpoint, main)


def test_a_stream_that_has_ended_is_not_cancelled(gateway: Gateway) -> None:
    """Nothing is sent that means nothing."""

    async def main(client: AsyncClient) -> None:
        await client.complete("a b")
        await client.status()

    run(gateway.endpoint, main)
    assert gateway.next_request().prompt == "a b"
    assert gateway.received.empty()


def test_a_refusal_is_an_error_with_code_and_field(quiet: Gateway) -> None:
    """And the gateway's own sentence."""

    async def main(client: AsyncClient) -> None:
        stream = client.stream("x")
        request = (await wait_for(quiet.next_request)).request
        quiet.send(Failed(request, "overloaded", None, "1024 requests wait already"))
        with pytest.raises(RequestFailed, match="1024 requests wait already") as caught:
            await anext(stream)
        assert caught.value.code == "overloaded"

    run(quiet.endpoint, main)


def test_nothing_at_the_endpoint_is_unreachable(tmp_path: Path) -> None:
    """The error names it."""

    async def main(client: AsyncClient) -> None:
        with pytest.raises(Unreachable, match="nothing answers there as a gateway"):
            await client.complete("x")

    run(f"ipc://{tmp_path}/nothing", main, connect_timeout_s=0.1)


def test_a_gateway_that_goes_ends_its_requests(quiet: Gateway) -> None:
    """At once."""

    async def main(client: AsyncClient) -> None:
        stream = client.stream("x")
        await wait_for(quiet.next_request)
        await wait_for(quiet.close)
        with pytest.raises(Unreachable, match="the gateway has gone"):
            await anext(stream)

    run(quiet.endpoint, main)


def test_an_answer_that_takes_too_long_is_cancelled(quiet: Gateway) -> None:
    """`timeout_s` is for the whole of it."""

    async def main(client: AsyncClient) -> None:
        stream = client.stream("x", timeout_s=0.1)
        request = (await wait_for(quiet.next_request)).request
        with pytest.raises(TimedOut, match=r"longer than 0\.1 s"):
            await anext(stream)
        assert await wait_for(quiet.next_cancel) == request

    run(quiet.endpoint, main)


def test_closing_the_client_ends_and_cancels_its_requests(quiet: Gateway) -> None:
    """The waiting task is told."""

    async def main(client: AsyncClient) -> None:
        async with background(client.complete("x")) as completion:
            request = (await wait_for(quiet.next_request)).request
            await client.close()
            with pytest.raises(ClientClosed):
                await completion
            assert await wait_for(quiet.next_cancel) == request

    run(quiet.endpoint, main)


def test_a_loop_that_ends_with_an_open_stream_does_no_harm(quiet: Gateway) -> None:
    """Chunks that come when nobody can be woken are dropped."""

    async def main(client: AsyncClient) -> None:
        stream = client.stream("x")
        request = (await wait_for(quiet.next_request)).request
        kept.append((client, stream, request))

    async def without_closing() -> None:
        await main(AsyncClient(quiet.endpoint))

    kept: list[tuple[AsyncClient, Any, str]] = []
    asyncio.run(without_closing())
    client, stream, request = kept.pop()
    quiet.send(chunk(request, "a"), last(request, "b"))
    asyncio.run(client.close())
    stream.close()
