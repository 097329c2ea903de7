"""The link to an attention worker on the same host: shared memory, sized once from what was assigned."""

from collections.abc import Sequence

import structlog
import zmq

from pannier.compute.link import Received, Tensors
from pannier.compute.share import PIECE_CREDITS, PIECE_ROWS
from pannier.net.shm import Layout, Waiting, knock
from pannier.runtime.tensor_channel import TensorChannel
from pannier.slicer import Call
from pannier.wire import ALIGNMENT, AttentionToCompute, ComputeToAttention
from pannier.wire import messages as m
from pannier.wire.traffic import Traffic

PAGE = 4096
HEADER_BYTES = 64 << 10
"""Of the largest message without segments, with room for a few small ones."""
SEGMENT_BYTES = 64
"""One segment in a header, or one block copy, at most."""
PARTS = 3
log = structlog.get_logger()


class ShmLink:
    """A link through shared memory. It watches for itself: its rings and its bell are among what `waiting` waits for.

    An attention worker that has gone is noticed at once; what is sent to it then is dropped, as a socket would drop
    it: what becomes of its group is the gateway's to say.
    """

    kind = "shm"
    socket: "zmq.Socket[bytes] | None" = None

    def __init__(
        self,
        waiting: Waiting,
        compute: str,
        address: m.ShardAddress,
        layout: Layout,
        traffic: Traffic | None = None,
    ) -> None:
        """Raises `CannotShare` with the reason."""
        self.name = address.name
        self.is_lost = False
        self._waiting = waiting
        self._channel = knock(address.door, compute, address.name, layout)
        self._messages: TensorChannel[AttentionToCompute] = TensorChannel(self._channel, AttentionToCompute, traffic)
        waiting.add(self._channel)

    def send(self, message: ComputeToAttention, tensors: Tensors) -> None:
        """Send, or keep until `flush`. Raises `PeerGone`, and `WireError` for a message that is too large."""
        if not self.is_lost:
            self._messages.send(message.lane, message, tensors)

    def receive(self) -> Received | None:
        """The next answer that has arrived. Raises `WireError`."""
        received = self._messages.receive()
        if received is None:
            if self._channel.is_lost and not self.is_lost:
                self._lose()
            return None
        _, message, tensors = received
        # Copied here: a lane takes its answer when it is resumed, and the ring is wanted back before that.
        copies = [tensor.clone() for tensor in tensors]
        self._messages.release()
        return message, copies

    def flush(self) -> bool:
        """Send what was kept; True if nothing is left."""
        return self.is_lost or self._messages.flush()

    def close(self) -> None:
        """Hang up; what was kept is dropped."""
        if not self.is_lost:
            self._waiting.remove(self._channel)
            self._messages.close()
            self.is_lost = True

    def _lose(self) -> None:
        log.warning("an attention worker has hung up", worker=self.name)
        self.close()


def layout(
    assign: m.ComputeAssign, heads: Sequence[m.HeadRange], calls: Sequence[Call], itemsize: int, window: int, lanes: int
) -> Layout:
    """Memory for all that may be under way at once in a lane, so that its rings are never full.

    To attention: two requests (of which one may be read while the next is written), the one-way pieces for which
    there are credits, and what begins a step. To compute: two answers, and acknowledgements. A sequence has at most
    `window` tokens, an element of a tensor `itemsize` bytes.
    """
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
    to_attention = 2 * (rows * request + begin + around) + PIECE_CREDITS * (PIECE_ROWS * piece + around)
    to_compute = 2 * (rows * answer + around)
    return Layout(lanes, (_pages(to_attention), _pages(to_compute)))


def _pages(size: int) -> int:
    return -(-size // PAGE) * PAGE
