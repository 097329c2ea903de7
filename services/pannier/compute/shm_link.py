"""The link to an attention worker on the same host: shared memory, sized once from what was assigned."""

from pannier.compute.link import Received, Tensors
from pannier.compute.link_sizes import LinkSizes
from pannier.compute.share import PIECE_CREDITS
from pannier.net.shm import Layout, Waiting, knock
from pannier.runtime.tensor_channel import TensorChannel
from pannier.wire import AttentionToCompute, ComputeToAttention
from pannier.wire import messages as m
from pannier.wire.traffic import Traffic

PAGE = 4096


class ShmLink:
    """A link through shared memory: its rings and its bell are among what `waiting` waits for.

    That the other end has hung up, or its process has ended, is noticed at once.
    """

    kind = "shm"
    is_up = True  # who has knocked may write, and is answered or hung up on

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
        self.lost: str | None = None
        self._waiting = waiting
        self._channel = knock(address.door, compute, address.name, layout)
        self._messages: TensorChannel[AttentionToCompute] = TensorChannel(self._channel, AttentionToCompute, traffic)
        waiting.add(self._channel)

    def send(self, message: ComputeToAttention, tensors: Tensors) -> None:
        """Send, or keep until `flush`. Raises `PeerGone`, and `WireError` for a message that is too large."""
        if self.lost is None:
            self._messages.send(message.lane, message, tensors)

    def receive(self) -> Received | None:
        """The next answer that has arrived. Raises `WireError`."""
        received = self._messages.receive()
        if received is None:
            if self._channel.is_lost:
                self.close()
            return None
        _, message, tensors = received
        # Copied here: a lane takes its answer when it is resumed, and the ring is wanted back before that.
        copies = [tensor.clone() for tensor in tensors]
        self._messages.release()
        return message, copies

    def flush(self) -> bool:
        """Send what was kept; True if nothing is left."""
        return self.lost is not None or self._messages.flush()

    def close(self) -> None:
        """Hang up; what was kept is dropped."""
        if self.lost is None:
            self.lost = "shared memory: " + ("it has hung up" if self._channel.is_lost else "closed")
            self._waiting.remove(self._channel)
            self._messages.close()


def layout(sizes: LinkSizes, lanes: int) -> Layout:
    """Memory for all that may be under way at once in a lane, so that its rings are never full.

    To attention: two requests (of which one may be read while the next is written), the one-way pieces for which
    there are credits, and what begins a step. To compute: two answers, and acknowledgements.
    """
    to_attention = 2 * (sizes.request + sizes.begin) + PIECE_CREDITS * sizes.piece
    return Layout(lanes, (_pages(to_attention), _pages(2 * sizes.answer)))


def _pages(size: int) -> int:
    return -(-size // PAGE) * PAGE
