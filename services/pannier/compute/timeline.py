"""What the lanes of one compute worker did, kept in memory and written when the worker ends."""

import json
from collections import deque
from pathlib import Path

from pannier.compute.step_clock import Span

MAX_SPANS = 200_000
"""Older ones are forgotten."""


class Timeline:
    """The latest spans of all lanes."""

    def __init__(self) -> None:
        self._spans: deque[Span] = deque(maxlen=MAX_SPANS)

    def record(self, span: Span) -> None:
        """Keep a span."""
        self._spans.append(span)

    def write(self, path: Path, worker: str) -> None:
        """One JSON object: the worker's name, and the spans in order of their ends as lists of a span's fields."""
        found = {"worker": worker, "fields": Span._fields, "spans": list(self._spans)}
        path.write_text(json.dumps(found), encoding="utf-8")
