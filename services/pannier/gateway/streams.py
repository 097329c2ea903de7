"""Live requests: who asked, and what has gone out to them."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from pannier.gateway.output_text import OutputText, Released
from pannier.gateway.request_span import RequestSpan
from pannier.scheduler import Output
from pannier.wire import messages as m


@dataclass(eq=False)
class Stream:
    """One request between its admission and its last delta. Output number i of it is that of `sequences[i]`."""

    peer: bytes
    request: str
    sequences: tuple[int, ...]
    outputs: Sequence[OutputText]
    num_prompt: int
    deadline: float = inf
    span: RequestSpan | None = None
    """None: it is not traced."""
    num_sent: int = 0
    """Tokens of all outputs."""
    num_cached: int | None = None
    """Tokens of the prompt that the cache had as the request began; None: no token was drawn yet."""
    unfinished: set[int] = field(init=False)
    """Sequences whose output goes on."""

    def __post_init__(self) -> None:
        self.unfinished = set(self.sequences)

    def text_of(self, sequence: int) -> OutputText:
        """The text of one of its sequences."""
        return self.outputs[self.sequences.index(sequence)]

    def delta(self, output: Output, released: Released, finish_reason: str | None) -> m.Delta | None:
        """What the client is sent of one output; None when there is nothing new."""
        self.num_sent += len(released.drawn)
        if self.num_cached is None and output.drawn is not None:
            self.num_cached = output.num_cached
        if finish_reason is not None:
            self.unfinished.discard(output.sequence)
        elif not released.drawn and not released.text and not output.scored:
            return None
        return m.Delta(
            request=self.request,
            index=self.sequences.index(output.sequence),
            text=released.text,
            tokens=tuple([drawn.token for drawn in released.drawn]),  # a list first: half the time, for every token
            logprobs=tuple(
                [
                    m.TokenLogprob(drawn.token, drawn.logprob, drawn.top)
                    for drawn in released.drawn
                    if drawn.logprob is not None
                ]
            ),
            prompt_logprobs=output.scored,
            finish_reason=finish_reason,
            usage=None if self.unfinished else self._usage(),
        )

    def _usage(self) -> m.Usage:
        return m.Usage(self.num_prompt, self.num_cached or 0, self.num_sent)


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
        return len(self._by_request)

    def all(self) -> list[Stream]:
        """The live streams."""
        return list(self._by_request.values())

    def of_peer(self, peer: bytes) -> list[Stream]:
        """The live streams of a client."""
        return [stream for stream in self._by_request.values() if stream.peer == peer]

    def open(self, stream: Stream) -> None:
        """Add a stream."""
        self._empty.clear()
        self._by_sequence.update(dict.fromkeys(stream.sequences, stream))
        self._by_request[stream.peer, stream.request] = stream

    def of_sequence(self, sequence: int) -> Stream | None:
        """The stream of a sequence, if that is still live."""
        stream = self._by_sequence.get(sequence)
        return stream if stream is not None and sequence in stream.unfinished else None

    def of_request(self, peer: bytes, request: str) -> Stream | None:
        """The stream that a client means, if it is still live."""
        return self._by_request.get((peer, request))

    def close(self, stream: Stream) -> None:
        """Forget a stream; again is fine."""
        for sequence in stream.sequences:
            self._by_sequence.pop(sequence, None)
        self._by_request.pop((stream.peer, stream.request), None)
        if not self._by_request:
            self._empty.set()
