"""Sequences that wait for blocks, by rank: whoever was preempted stands where it stood before."""

from heapq import heappop, heappush

from pannier.scheduler.sequence import Sequence


class WaitingQueue:
    """A queue by rank from which anyone may leave."""

    def __init__(self) -> None:
        self._sequences: dict[int, Sequence] = {}
        self._order: list[tuple[int, int, int, int]] = []  # rank and number; who has left is skipped at the head

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, number: object) -> bool:
        return number in self._sequences

    def push(self, sequence: Sequence) -> None:
        """Let a sequence wait."""
        self._sequences[sequence.number] = sequence
        heappush(self._order, (*sequence.rank, sequence.number))

    def head(self) -> Sequence | None:
        """Who is next; None when nobody waits."""
        while self._order:
            sequence = self._sequences.get(self._order[0][-1])
            if sequence is not None:
                return sequence
            heappop(self._order)
        return None

    def leave(self, sequence: Sequence) -> None:
        """A sequence waits no longer; again is fine."""
        self._sequences.pop(sequence.number, None)
