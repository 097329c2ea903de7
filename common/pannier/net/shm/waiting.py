"""How a process waits for sockets and for rings in shared memory at once.

It looks at the rings first, then a little longer (`Spin`), then says that it sleeps and waits in the poller, where a
peer that sees it asleep rings.
"""

from typing import Any

import zmq

from pannier.net.shm.channel import Channel
from pannier.net.shm.compiled import functions
from pannier.net.shm.ring import Addresses
from pannier.net.shm.spin import SPIN_US, Spin

SOCKETS_EVERY = 16
"""Waits in a row that rings may end before the sockets are looked at."""


class Waiting:
    """A poller that also knows channels. Without channels it is a poller, and needs no compiled part."""

    def __init__(self, spin_us: int = SPIN_US) -> None:
        self.channels: list[Channel] = []
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
        budget = self._spin.budget_ns(1 + len(self.channels)) if timeout_ms != 0 else 0
        return bool(self._functions.spin(self._rings.address, self._rings.count, budget))

    def _sleep(self, timeout_ms: int | None) -> dict[Any, int]:
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
