"""How a process waits for sockets and for rings in shared memory at once.

It looks at the rings first, then a little longer (`Spin`), then says that it sleeps and waits in the poller, where a
peer that sees it asleep rings.
"""

from itertools import chain
from typing import Any

import zmq

from pannier.net.shm.atomics import atomics
from pannier.net.shm.channel import Addresses, Channel
from pannier.net.shm.spin import Spin

SOCKETS_EVERY = 16
"""Waits in a row that rings may end before the sockets are looked at."""


class Waiting:
    """A poller that also knows channels. Without channels it is a poller, and needs no compiled helper."""

    def __init__(self) -> None:
        self.channels: list[Channel] = []
        self._poller = zmq.Poller()
        self._spin = Spin()
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

    def wait(self, timeout_ms: int | None) -> dict[Any, int]:
        """What is ready, as a poller says it, once something is: nothing of it when a ring has a message."""
        if not self.channels:
            return dict(self._poller.poll(timeout_ms))
        if self._rings_have_something(timeout_ms) and self._in_a_row < SOCKETS_EVERY:
            self._in_a_row += 1
            return {}
        self._in_a_row = 0
        return self._sleep(timeout_ms)

    def _rings_have_something(self, timeout_ms: int | None) -> bool:
        rings = self._written.address, self._read.address, self._written.count
        if self._atomics.find(*rings, 0) >= 0:
            return True
        budget = self._spin.budget_ns(1 + len(self.channels)) if timeout_ms != 0 else 0
        return budget > 0 and self._atomics.spin(*rings, budget) >= 0

    def _sleep(self, timeout_ms: int | None) -> dict[Any, int]:
        links = self._asleep.address, self._asleep.count
        rings = self._written.address, self._read.address, self._written.count
        stays_awake = self._atomics.fall_asleep(*links, *rings)
        ready = dict(self._poller.poll(0 if stays_awake else timeout_ms))
        self._atomics.wake(*links)
        for channel in self.channels:
            if channel.fileno() in ready:
                channel.hear()
        return ready

    def _gather(self) -> None:
        """What the helper looks at, in one call for all channels."""
        readers = list(chain.from_iterable(channel.readers for channel in self.channels))
        self._atomics = atomics()
        self._written = Addresses([reader.written_at for reader in readers])
        self._read = Addresses([reader.read_at for reader in readers])
        self._asleep = Addresses([channel.asleep_at for channel in self.channels])
