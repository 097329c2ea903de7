"""Says when the KV cache is too small for what runs: not at each preemption, but once in a while. No clock."""

from collections.abc import Iterable

import structlog

INTERVAL_S = 10.0
NAMED = 3
"""Requests that are named; the others are counted."""
ADVICE = "give attention workers more memory, or run with a smaller max_sequences, or ask for fewer max_tokens"
log = structlog.get_logger()


class Shortage:
    """Collects who was preempted until it is time to say so."""

    def __init__(self) -> None:
        self.num_preemptions = 0
        """Since the gateway started."""
        self._unsaid = 0
        self._requests: dict[str, None] = {}  # in order, each once
        self._silent_until = 0.0

    def note(self, requests: Iterable[str]) -> None:
        """These were preempted, in this order; one may have been more than once."""
        for request in requests:
            self.num_preemptions += 1
            self._unsaid += 1
            self._requests[request] = None

    def report(self, now: float) -> None:
        """Say it, unless there is nothing to say or it was said a moment ago."""
        if not self._unsaid or now < self._silent_until:
            return
        names = list(self._requests)
        shown = ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
        log.warning("KV cache is short", preemptions=self._unsaid, requests=shown, advice=ADVICE)
        self._silent_until = now + INTERVAL_S
        self._unsaid, self._requests = 0, {}
