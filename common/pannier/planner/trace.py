"""Request traces that others have published, read one line at a time.

=========  ======================================================================================================
azure      csv: TIMESTAMP, ContextTokens, GeneratedTokens (https://github.com/Azure/AzurePublicDataset)
mooncake   a JSON object a line: timestamp [ms], input_length, output_length, and hash_ids, one for each 512 tokens
           of the prompt; equal ids mean equal tokens (https://github.com/kvcache-ai/Mooncake)
=========  ======================================================================================================
"""

import csv
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from pannier.runtime.errors import PannierError

HASHED_TOKENS = 512
"""Prompt tokens that one hash id stands for."""

HASH_IDS = 1 << 30
"""Hash ids are smaller than this."""

FORMATS = ("azure", "mooncake")

_EXTRA = "\n"  # the key of values that no column names: no column can be called like this

Length = Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
HashId = Annotated[int, msgspec.Meta(ge=0, lt=HASH_IDS)]


class TraceError(PannierError):
    """Raised when a trace can't be read; names file, line and field."""


class TraceRequest(NamedTuple):
    """One request as a trace tells it."""

    arrival_s: float
    """Seconds after the trace's first request."""
    prompt_length: int
    output_length: int
    hash_ids: tuple[int, ...] | None = None
    """What every 512 tokens of the prompt are, the last ones perhaps fewer; None where the trace doesn't say."""


class _AzureLine(msgspec.Struct):
    TIMESTAMP: datetime
    ContextTokens: Length
    GeneratedTokens: Length


class _MooncakeLine(msgspec.Struct):
    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Length
    output_length: Length
    hash_ids: tuple[HashId, ...] | None = None


def read_trace(path: Path, form: str = "auto") -> Iterator[TraceRequest]:
    """The trace's requests in their order, read as they are asked for; raises `TraceError` at the first bad line."""
    if form == "auto":
        form = _form_of(path)
    if form not in FORMATS:
        raise TraceError(f"the trace's format is {form!r}; it must be auto, {' or '.join(FORMATS)}")
    try:
        # A byte that is no UTF-8 becomes a character that no field allows, and is reported with its line.
        with path.open(encoding="utf-8-sig", errors="replace") as lines:
            yield from (_azure if form == "azure" else _mooncake)(path, lines)
    except OSError as error:
        raise TraceError(f"{path} can't be read: {error.strerror}") from error


def _form_of(path: Path) -> str:
    try:
        with path.open(encoding="utf-8-sig", errors="replace") as lines:
            first = next((line for line in lines if line.strip()), "")
    except OSError as error:
        raise TraceError(f"{path} can't be read: {error.strerror}") from error
    if first.lstrip().startswith("{"):
        return "mooncake"
    if "TIMESTAMP" in first:
        return "azure"
    raise TraceError(f"{path}, line 1: neither a JSON object (mooncake) nor a header with TIMESTAMP (azure)")


def _azure(path: Path, lines: Iterable[str]) -> Iterator[TraceRequest]:
    rows = csv.DictReader(lines, restkey=_EXTRA, quoting=csv.QUOTE_NONE)
    clock = _Clock(path, "TIMESTAMP")
    try:
        for row in rows:
            place = f"{path}, line {rows.line_num}"
            if _EXTRA in row:
                raise TraceError(f"{place}: more values than the header has fields")
            line = _checked(place, row, _AzureLine)
            when = line.TIMESTAMP if line.TIMESTAMP.tzinfo else line.TIMESTAMP.replace(tzinfo=UTC)
            arrival_s = clock.since_first(place, when.timestamp())
            yield TraceRequest(arrival_s, line.ContextTokens, line.GeneratedTokens)
    except csv.Error as error:
        raise TraceError(f"{path}, line {rows.line_num}: {error}") from error


def _checked(place: str, row: dict[str, str], kind: type[_AzureLine]) -> _AzureLine:
    try:
        return msgspec.convert(row, kind, strict=False)
    except msgspec.ValidationError as error:
        raise TraceError(f"{place}: {error}") from error


def _mooncake(path: Path, lines: Iterable[str]) -> Iterator[TraceRequest]:
    decoder = msgspec.json.Decoder(_MooncakeLine)
    clock = _Clock(path, "timestamp")
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        place = f"{path}, line {number}"
        try:
            line = decoder.decode(text)
        except msgspec.DecodeError as error:
            raise TraceError(f"{place}: {error}") from error
        wanted = -(-line.input_length // HASHED_TOKENS)
        if line.hash_ids is not None and len(line.hash_ids) != wanted:
            raise TraceError(
                f"{place}: hash_ids has {len(line.hash_ids)} ids; an input_length of {line.input_length} needs {wanted}"
            )
        arrival_s = clock.since_first(place, line.timestamp / 1000)
        yield TraceRequest(arrival_s, line.input_length, line.output_length, line.hash_ids)


class _Clock:
    """Times of a trace, which may stand still but never go back."""

    def __init__(self, path: Path, field: str) -> None:
        self._path = path
        self._field = field
        self._first: float | None = None
        self._last = 0.0

    def since_first(self, place: str, seconds: float) -> float:
        if self._first is None:
            self._first = self._last = seconds
        if seconds < self._last:
            raise TraceError(f"{place}: {self._field} is {self._last - seconds:g} s before the line above")
        self._last = seconds
        return seconds - self._first
