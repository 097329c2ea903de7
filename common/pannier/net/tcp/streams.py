"""The connections that one thread waits for, together."""

import select

from pannier.net.tcp.stream import Stream

EVENTS = 64
"""Taken from the system at once."""
TO_SEND = select.EPOLLIN | select.EPOLLOUT


class Streams:
    """Notes which of them have something to read, or take more. `fileno` is what a poller watches."""

    def __init__(self) -> None:
        self.processes_here = 0
        """On this host, at other ends."""
        self._ready = select.epoll()
        self._streams: dict[int, Stream] = {}
        self._wanted: dict[int, int] = {}
        """What each is watched for."""

    def __len__(self) -> int:
        return len(self._streams)

    def fileno(self) -> int:
        """Readable when `look` would find something."""
        return self._ready.fileno()

    def add(self, stream: Stream) -> None:
        """Watch a stream."""
        number = stream.fileno()
        self._ready.register(number, select.EPOLLIN)
        self._streams[number], self._wanted[number] = stream, select.EPOLLIN
        self._count()

    def remove(self, stream: Stream) -> None:
        """Watch it no more. Before it is closed."""
        number = stream.fileno()
        self._ready.unregister(number)
        del self._streams[number], self._wanted[number]
        self._count()

    def prepare(self) -> bool:
        """Before waiting: whether something that was read already waits to be received, which wakes no poller.

        From here on those are watched for room too that have kept something.
        """
        is_ready = False
        for number, stream in self._streams.items():
            is_ready |= stream.reader.is_ready
            wanted = TO_SEND if stream.writer.waiting else select.EPOLLIN
            if wanted != self._wanted[number]:
                self._ready.modify(number, wanted)
                self._wanted[number] = wanted
        return is_ready

    def look(self) -> bool:
        """Whether one of them can be read, or takes more of what it has kept."""
        events = self._ready.poll(0, EVENTS)
        for number, event in events:
            if event != select.EPOLLOUT:
                self._streams[number].notice()
        return bool(events)

    def close(self) -> None:
        """Watch nothing any more."""
        self._ready.close()

    def _count(self) -> None:
        self.processes_here = len({stream.peer for stream in self._streams.values() if stream.is_local()})
