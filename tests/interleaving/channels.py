"""The simulated network: frames that wait until chance delivers them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypeAlias

import torch

Frame: TypeAlias = tuple[Any, list[torch.Tensor]]


@dataclass(eq=False)
class Channel:
    """One direction between two processes. Ordered ones deliver first come first served, the others anyhow."""

    name: str
    ordered: bool
    deliver: Callable[[Any, list[torch.Tensor]], None]
    busy: "dict[Channel, None]"
    """All channels with frames under way; this one is added when it has some."""
    receiver: "Process | None" = None
    frames: list[Frame] = field(default_factory=list)
    held_until: int = 0
    """Tick before which nothing of it arrives."""

    def send(self, message: Any, tensors: list[torch.Tensor] | None = None) -> None:
        """Put a frame on its way."""
        self.frames.append((message, tensors or []))
        self.busy[self] = None

    def can_deliver(self, tick: int) -> bool:
        """Whether a frame may arrive now."""
        return tick >= self.held_until and (self.receiver is None or self.receiver.is_running)

    def deliver_one(self, chance: Random) -> None:
        """Deliver the first frame, or any if that is allowed."""
        late = not self.ordered and len(self.frames) > 1 and chance.random() < 0.5
        message, tensors = self.frames.pop(chance.randrange(len(self.frames)) if late else 0)
        self._rest_if_empty()
        self.deliver(message, tensors)

    def lose_some(self, chance: Random) -> None:
        """An end is gone: what is under way may be lost, from some frame on (or anywhere, if unordered)."""
        if self.ordered:
            del self.frames[chance.randint(0, len(self.frames)) :]
        else:
            self.frames = [frame for frame in self.frames if chance.random() < 0.5]
        self._rest_if_empty()

    def lose_all(self) -> None:
        """What is under way never arrives."""
        self.frames.clear()
        self._rest_if_empty()

    def _rest_if_empty(self) -> None:
        if not self.frames:
            self.busy.pop(self, None)


@dataclass(eq=False)
class Process:
    """A process that may be stopped, and that may end."""

    name: str
    is_alive: bool = True
    is_stopped: bool = False

    @property
    def is_running(self) -> bool:
        """Whether it receives and sends."""
        return self.is_alive and not self.is_stopped
