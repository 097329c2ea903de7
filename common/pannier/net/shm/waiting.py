"""How a process waits at once for sockets, for rings in shared memory, and for streams over plain TCP.

It looks at rings and streams first, then a little longer (`Spin`), then says that it sleeps and waits in the poller,
where a peer that sees it asleep rings.
"""

import time
from typing import Any

import zmq

from pannier.net.shm.channel import Channel
from pannier.net.shm.compiled import functions
from pannier.net.shm.ring import Addresses
from pannier.net.shm.spin import SPIN_US, Spin
from pannier.net.tcp import Stream, Streams

SOCKETS_EVERY = 16
"""Waits in a row that rings and streams may end before the sockets are looked at."""
TURN_NS = 2000
"""How long rings are looked at before the streams are, and so on."""


class Waiting:
    """A poller that also knows channels and streams. Without channels it needs no compiled part."""

    def __init__(self, spin_us: int = SPIN_US) -> None:
        self.channels: list[Channel] = []
        self._streams: Streams | None = None
        self._poller = zmq.Poller()
        self._spin = Spin(spin_us)
        self._in_a_row = 0

    def register(self, readable: Any) -> None:
        """Watch a ZeroMQ socket, or what has a fileno."""
        self._poller.register(readable, zmq.POLLIN)

    def unregister(self, readable: Any) -> None:
        """Watch it no more."""
        self._poller.unregister(readable)

    def add(self, channel: Channel) -> None:
        """Watch a channel's rings and its bell."""
        self._poller.register(channel.fileno(), zmq.POLLIN)
        self.channels.append(channel)
        self._gather()

    def remove(self, channel: Channel) -> None:
        """Watch it no more. Before it is closed."""
        self._poller.unregister(channel.fileno())
        self.channels.remove(channel)
        self._gather()

    def add_stream(self, stream: Stream) -> None:
        """Watch a stream: for what comes, and for room while it has more to send."""
        if self._streams is None:
            self._streams = Streams()
            self._poller.register(self._streams, zmq.POLLIN)
        self._streams.add(stream)

    def remove_stream(self, stream: Stream) -> None:
        """Watch it no more. Before it is closed."""
        assert self._streams is not None
        self._streams.remove(stream)
        if not len(self._streams):
            self._poller.unregister(self._streams)
            self._streams.close()
            self._streams = None

    def wait(self, timeout_ms: int | None) -> dict[Any, int]:
        """What is ready, as a poller says it, once something is: nothing of it when a ring or a stream has a message.

        Or when a stream takes more of what was kept.
        """
        if not self.channels and self._streams is None:
            return dict(self._poller.poll(timeout_ms))
        has_something = self._look(timeout_ms != 0)
        if has_something and self._in_a_row < SOCKETS_EVERY:
            self._in_a_row += 1
            return {}
        self._in_a_row = 0
        return self._sleep(0 if has_something else timeout_ms)

    def _look(self, may_spin: bool) -> bool:
        """Whether a ring has a message or a stream is ready, or gets so while it is worth while to look."""
        streams = self._streams
        if streams is None:
            return self._rings_have_something(self._spin.budget_ns(1 + len(self.channels)) if may_spin else 0)
        if streams.prepare() or self._rings_have_something(0):
            return True
        budget_ns = self._spin.budget_ns(1 + len(self.channels) + streams.processes_here) if may_spin else 0
        if not budget_ns:
            return False
        end = time.perf_counter_ns() + budget_ns
        while not streams.look() and not self._rings_have_something(TURN_NS):
            if time.perf_counter_ns() > end:
                return False
        return True

    def _rings_have_something(self, budget_ns: int) -> bool:
        return bool(self.channels) and bool(self._functions.spin(self._rings.address, self._rings.count, budget_ns))

    def _sleep(self, timeout_ms: int | None) -> dict[Any, int]:
        ready = self._sleep_with_rings(timeout_ms) if self.channels else dict(self._poller.poll(timeout_ms))
        if self._streams is not None and ready.pop(self._streams.fileno(), 0):
            self._streams.look()
        return ready

    def _sleep_with_rings(self, timeout_ms: int | None) -> dict[Any, int]:
        falls_asleep = self._functions.fall_asleep(self._rings.address, self._rings.count)
        ready = dict(self._poller.poll(timeout_ms if falls_asleep else 0))
        self._functions.wake(self._rings.address, self._rings.count)
        for channel in self.channels:
            if channel.fileno() in ready:
                channel.hear()
        return ready

    def _gather(self) -> None:
        """What the compiled part looks at, in one call for all channels."""
        self._functions = functions()
        self._rings = Addresses([ring for channel in self.channels for ring in channel.readers.rings])
