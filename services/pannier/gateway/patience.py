"""When to stop waiting, counted in heartbeats. No clock."""

from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Patience(Generic[K]):
    """Notices what has stood where it stands for `limit` heartbeats in a row."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._standing: dict[K, tuple[object, int]] = {}

    def beat(self, waiting: Mapping[K, object]) -> list[K]:
        """A heartbeat is due. `waiting` says where each thing stands that is waited for; returns the hopeless ones."""
        before, self._standing = self._standing, {}
        for key, place in waiting.items():
            last, beats = before.get(key, (place, 0))
            self._standing[key] = (place, beats + 1 if last == place else 1)
        return [key for key, (_, beats) in self._standing.items() if beats > self._limit]
