"""Live requests: who asked, and what has gone out to them."""

import asyncio
from dataclasses import dataclass

from pannier.gateway.output_text import OutputText, Released
from pannier.wire import messages as m


@dataclass
class Stream:
    """One request between its admission and its last delta."""

    peer: bytes
    request: str
    sequence: int
    output: OutputText
    prompt_tokens: int
    num_sent: int = 0
    """Tokens."""

    def delta(self, released: Released, finish_reason: str | None) -> m.Delta | None:
        """What the client is sent; None when there is nothing new."""
        self.num_sent += len(released.drawn)
        if not released.drawn and not released.text and finish_reason is None:
            return None
        return m.Delta(
            request=self.request,
            text=released.text,
            tokens=tuple(drawn.token for drawn in released.drawn),
            logprobs=tuple(
                m.TokenLogprob(drawn.token, drawn.logprob, drawn.top)
                for drawn in released.drawn
                if drawn.logprob is not None
            ),
            finish_reason=finish_reason,
            usage=m.Usage(self.prompt_tokens, 0, self.num_sent) if finish_reason else None,
        )


class Streams:
    """All live requests, by sequence and by what their client calls them."""

    def __init__(self) -> None:
        self._by_sequence: dict[int, Stream] = {}
        self._by_request: dict[tuple[bytes, str], Stream] = {}
        self._empty = asyncio.Event()
        self._empty.set()

    async def until_empty(self) -> None:
        """Wait until no request is live."""
        await self._empty.wait()

    def __len__(self) -> int:
        return len(self._by_sequence)

    def all(self) -> list[Stream]:
        """The live streams."""
        return list(self._by_sequence.values())

    def of_peer(self, peer: bytes) -> list[Stream]:
        """The live streams of a client."""
        return [stream for stream in self._by_sequence.values() if stream.peer == peer]

    def open(self, stream: Stream) -> None:
        """Add a stream."""
        self._empty.clear()
        self._by_sequence[stream.sequence] = self._by_request[stream.peer, stream.request] = stream

    def of_sequence(self, sequence: int) -> Stream | None:
        """The stream of a sequence, if it is still live."""
        return self._by_sequence.get(sequence)

    def of_request(self, peer: bytes, request: str) -> Stream | None:
        """The stream that a client means, if it is still live."""
        return self._by_request.get((peer, request))

    def close(self, stream: Stream) -> None:
        """Forget a stream; again is fine."""
        self._by_sequence.pop(stream.sequence, None)
        self._by_request.pop((stream.peer, stream.request), None)
        if not self._by_sequence:
            self._empty.set()
