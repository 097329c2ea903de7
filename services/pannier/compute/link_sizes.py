"""How large the messages of a link can get, which follows from what was assigned."""

from collections.abc import Sequence
from typing import NamedTuple

from pannier.compute.share import PIECE_ROWS
from pannier.slicer import Call
from pannier.wire import ALIGNMENT
from pannier.wire import messages as m

HEADER_BYTES = 64 << 10
"""Of the largest header without segments, with room for a few small messages."""
SEGMENT_BYTES = 64
"""One segment in a header, or one block copy, at most."""
PARTS = 3


class LinkSizes(NamedTuple):
    """Bytes of the largest messages of each kind, headers and gaps included."""

    begin: int
    request: int
    piece: int
    answer: int

    @property
    def largest(self) -> tuple[int, int]:
        """Of the largest message of any kind, to attention and to compute."""
        return max(self.begin, self.request, self.piece), self.answer


def link_sizes(
    assign: m.ComputeAssign, heads: Sequence[m.HeadRange], calls: Sequence[Call], itemsize: int, window: int
) -> LinkSizes:
    """To a shard with these heads. A sequence has at most `window` tokens, an element of a tensor `itemsize` bytes."""
    request = piece = answer = 0
    for call, part in zip(calls, heads, strict=True):
        kv_heads = part.stop - part.start
        q_heads = kv_heads * (call.q_heads // call.kv_heads)
        stored = kv_heads * (call.k_size + call.v_size) * itemsize
        request = max(request, stored + q_heads * call.k_size * itemsize)
        piece = max(piece, stored)
        answer = max(answer, q_heads * (call.v_size * itemsize + 4))
    rows = assign.max_batch_tokens
    begin = rows * (SEGMENT_BYTES + 4 * -(-window // assign.block_size))
    around = HEADER_BYTES + PARTS * ALIGNMENT
    return LinkSizes(begin + around, rows * request + around, PIECE_ROWS * piece + around, rows * answer + around)
