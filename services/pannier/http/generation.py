"""The outputs of one HTTP request as they come: of each prompt, and of each of its samples."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress

from pannier.client import AsyncStream, Delta
from pannier.http.metrics import Metrics, Watch

Numbered = tuple[int, Delta]
"""Which prompt of the request, and what is new of it."""


class Generation:
    """Deltas of all prompts, merged in the order in which they come. Closing it cancels what is unfinished."""

    def __init__(self, streams: Sequence[AsyncStream], metrics: Metrics) -> None:
        self._streams = streams
        self._watches = [Watch(metrics) for _ in streams]

    async def deltas(self) -> AsyncIterator[Numbered]:
        """Until all have ended. Raises `ClientError`."""
        try:
            if len(self._streams) == 1:
                async for delta in self._streams[0]:
                    self._watches[0].see(delta)
                    yield 0, delta
            else:
                async for numbered in self._merged():
                    yield numbered
        finally:
            self.close()

    def close(self) -> None:
        """Cancel what is unfinished; again is fine."""
        for stream, watch in zip(self._streams, self._watches, strict=True):
            stream.close()
            watch.close()

    async def _merged(self) -> AsyncIterator[Numbered]:
        waiting = {asyncio.ensure_future(anext(stream)): number for number, stream in enumerate(self._streams)}
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    number = waiting.pop(task)
                    with suppress(StopAsyncIteration):
                        delta = task.result()
                        waiting[asyncio.ensure_future(anext(self._streams[number]))] = number
                        self._watches[number].see(delta)
                        yield number, delta
        finally:
            for task in waiting:
                task.cancel()
