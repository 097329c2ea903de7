"""What comes over the links of a worker, in bytes: tensors apart from all that is needed to send them."""

from functools import lru_cache

from pannier.wire.messages import Answer, Message, Piece
from pannier.wire.parts import REMEMBERED, Part


class Traffic:
    """Counted where a message is decoded, so by its receiver, and once, whatever kind of link brought it."""

    def __init__(self) -> None:
        self.tensor_bytes = 0
        """Of q, k and v, and of answers with their log-sum-exps."""
        self.header_bytes = 0
        """Of everything else: headers, padding between tensors, and what begins and ends a step."""

    def count(self, message: Message, header_bytes: int, payload_bytes: int) -> None:
        """A message has come."""
        tensor_bytes = _bytes_of(message.parts) if isinstance(message, Piece | Answer) else 0
        self.tensor_bytes += tensor_bytes
        self.header_bytes += header_bytes + payload_bytes - tensor_bytes

    def counters(self) -> dict[str, int]:
        """As a worker shows them."""
        return {"link_tensor_bytes": self.tensor_bytes, "link_header_bytes": self.header_bytes}


@lru_cache(REMEMBERED)
def _bytes_of(parts: tuple[Part, ...]) -> int:
    return sum(part.nbytes for part in parts)
