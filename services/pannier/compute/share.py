"""One attention worker's share of one step: the rows of its group, the heads of its shard."""

import time
from collections.abc import Generator, Sequence

import torch

from pannier.compute.link import Link, Tensors
from pannier.compute.rows import GroupRows
from pannier.slicer import Call
from pannier.wire import AttentionToCompute, WireError
from pannier.wire import messages as m

PIECE_ROWS = 256
"""Rows of a one-way piece at most."""
PIECE_CREDITS = 4
"""One-way pieces that may be under way to one worker in one lane-step."""


class ShardFailed(Exception):
    """An attention worker says that it can't do the step, and why."""


class Share:
    """What one link still owes in a step, and how much more may be sent on it.

    There is one request credit: the next request is not sent before the last answer is here.
    """

    def __init__(
        self,
        link: Link,
        step: m.Step,
        rows: GroupRows,
        heads: Sequence[m.HeadRange],
        calls: Sequence[Call],
    ) -> None:
        self.link = link
        self.rows = rows
        self.written = False
        self.aborted = False
        self.call_s = 0.0
        """Seconds of attention in the call answered last."""
        self.answered_at = 0.0
        """When that answer was seen, in seconds of `time.perf_counter`."""
        self._heads = heads
        self._calls = calls
        self._frame = (step.life, step.session, step.step, step.lane)
        self._pieces = 0
        self._credits = PIECE_CREDITS
        self._asked: int | None = None
        """The call whose answer is owed or has not been taken yet."""
        self._owed: list[tuple[tuple[int, ...], torch.dtype]] = []
        """Shapes and dtypes of the answer."""
        self._answer: Tensors | None = None

    def begin(self, copies: tuple[m.BlockCopy, ...], calls: m.CallRange | None, traces: tuple[str, ...] = ()) -> None:
        """Tell the worker what the rows of the calls (None: all) will mean, and what the step is called in traces."""
        own_copies = tuple(copy for copy in copies if copy.group == self.rows.group)
        tables = torch.tensor(self.rows.block_tables, dtype=torch.int32)
        self.link.send(m.BeginStep(*self._frame, self.rows.segments, own_copies, (), calls, traces), [tables])

    def request(self, call: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lse_from: int) -> None:
        """Send q of the query rows with k and v of those that are stored; nothing if no row is answered."""
        if not self.rows.num_queries:
            return
        heads, ratio = self._heads[call], self._calls[call].q_heads // self._calls[call].kv_heads
        queries = q[self.rows.queries, heads.start * ratio : heads.stop * ratio]
        stored = self._stored(call, k, v, 0, self.rows.num_answered_stored)
        self._asked, self._answer = call, None
        num_rows, num_heads, _ = queries.shape
        self._owed = [
            ((num_rows, num_heads, self._calls[call].v_size), q.dtype),
            ((num_rows - lse_from, num_heads), torch.float32),
        ]
        self._send_piece(m.Piece(*self._frame, call, 0, True, lse_from, ()), [queries, *stored])

    def ship(self, call: int, k: torch.Tensor, v: torch.Tensor) -> Generator[None, None, None]:
        """Send k and v of the rows that nobody waits for, in pieces; yields while out of credit."""
        for first in range(self.rows.num_answered_stored, self.rows.num_stored, PIECE_ROWS):
            while self._credits == 0:
                yield
            self._credits -= 1
            stored = self._stored(call, k, v, first, min(first + PIECE_ROWS, self.rows.num_stored))
            self._send_piece(m.Piece(*self._frame, call, first, False, 0, ()), stored)

    def end(self) -> None:
        """Tell the worker that it has been sent everything."""
        self.link.send(m.EndStep(*self._frame, self._pieces), [])

    def abort(self) -> None:
        """Tell the worker to drop the step."""
        self.link.send(m.AbortStep(*self._frame), [])

    def receive(self, message: AttentionToCompute, tensors: Tensors) -> None:
        """Take an answer. Raises `ShardFailed`, or `WireError` if nothing of the kind is owed."""
        match message:
            case m.Answer() if message.call == self._asked and self._answer is None and self._is_owed(tensors):
                self._answer = tensors
                self.call_s, self.answered_at = message.attention_s, time.perf_counter()
            case m.PieceWritten() if self._credits < PIECE_CREDITS:
                self._credits += 1
            case m.StepWritten():
                self.written = True
            case m.StepAborted():
                self.aborted = True
            case m.StepFailed():
                raise ShardFailed(f"{self.link.name}: {message.reason}")
            case _:
                raise WireError(f"{self.link.name} sent an answer that nobody asked for")

    @property
    def waiting(self) -> bool:
        """Whether the answer to the last request is still outstanding."""
        return self._asked is not None and self._answer is None

    def take_answer(self) -> Tensors:
        """o [M, H, Dv] and LSE [M - lse_from, H] of this shard's heads."""
        assert self._answer is not None
        answer, self._asked, self._answer = self._answer, None, None
        return answer

    def _is_owed(self, tensors: Tensors) -> bool:
        return [(tuple(tensor.shape), tensor.dtype) for tensor in tensors] == self._owed

    def _stored(self, call: int, k: torch.Tensor, v: torch.Tensor, start: int, stop: int) -> Tensors:
        heads, rows = self._heads[call], self.rows.stored
        if isinstance(rows, slice):
            chosen: slice | torch.Tensor = slice(rows.start + start, rows.start + stop)
        else:
            chosen = rows[start:stop]
        return [k[chosen, heads.start : heads.stop], v[chosen, heads.start : heads.stop]]

    def _send_piece(self, piece: m.Piece, tensors: Tensors) -> None:
        self._pieces += 1
        self.link.send(piece, tensors)
