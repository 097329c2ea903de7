"""What `pannier bench link` sends: sizes, and the tensors of one call of a model."""

import json
import socket
import struct
from dataclasses import dataclass

from pannier.runtime.model_source import resolve

HEADER_BYTES = 64
"""About what a piece's header takes; plain TCP sends as much beside its payload."""
PLAN = struct.Struct("<QQ?")


@dataclass(frozen=True)
class Plan:
    """What comes next over plain TCP: so many messages of so many bytes."""

    size: int
    count: int
    is_echoed: bool

    def write(self, connection: socket.socket) -> None:
        """Tell the other end."""
        connection.sendall(PLAN.pack(self.size, self.count, self.is_echoed))

    @classmethod
    def read(cls, connection: socket.socket) -> "Plan | None":
        """What the other end says; None when it has gone."""
        said = memoryview(bytearray(PLAN.size))
        try:
            read_exactly(connection, said)
        except ConnectionError:
            return None
        return cls(*PLAN.unpack(said))


def read_exactly(connection: socket.socket, buffer: memoryview) -> None:
    """Fill the buffer. Raises `ConnectionError` when the peer goes before that."""
    while buffer:
        received = connection.recv_into(buffer)
        if not received:
            raise ConnectionError("the peer has gone")
        buffer = buffer[received:]


@dataclass(frozen=True)
class Case:
    """One measured exchange: bytes of q, k and v in a request, of which the answer is as large as q."""

    name: str
    queries: int
    keys: int
    values: int

    @classmethod
    def equal(cls, size: int) -> "Case":
        """So many bytes each way: queries, and hardly any keys and values."""
        return cls(f"{shown(size)} each way", size, 64, 64)

    @property
    def size(self) -> int:
        """Bytes to attention."""
        return self.queries + self.keys + self.values


@dataclass(frozen=True)
class Geometry:
    """What a model's decode rows send to attention and back, in bf16 and with equal layers."""

    calls: int
    q_heads: int
    kv_heads: int
    head_size: int
    itemsize: int = 2

    @classmethod
    def of(cls, model: str) -> "Geometry":
        """By the model's configuration. Raises `ModelError` if there is no such model."""
        source = resolve(model)
        if source.shape is not None:
            shape = source.shape
            return cls(shape.num_hidden_layers, shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim)
        assert source.path is not None
        whole = json.loads((source.path / "config.json").read_text(encoding="utf-8"))
        config = whole.get("text_config", whole)
        heads = config["num_attention_heads"]
        size = config.get("head_dim") or config["hidden_size"] // heads
        return cls(config["num_hidden_layers"], heads, config.get("num_key_value_heads") or heads, size)

    def case(self, model: str, rows: int) -> Case:
        """One call's exchange for so many decode rows."""
        row = rows * self.head_size * self.itemsize
        return Case(f"{model}, a call of {rows} rows", row * self.q_heads, row * self.kv_heads, row * self.kv_heads)

    def step_bytes(self, rows: int) -> int:
        """Tensor bytes of a step both ways: (2 + 2/G) e d B L, where d is the width of all heads, G queries a head."""
        return 2 * rows * self.calls * self.itemsize * self.head_size * (self.q_heads + self.kv_heads)


def shown(size: int) -> str:
    """A size as people write it: 16K, 1M."""
    for unit, letter in ((1 << 20, "M"), (1 << 10, "K")):
        if size >= unit and size % unit == 0:
            return f"{size // unit}{letter}"
    return str(size)


def size_of(text: str) -> int:
    """The bytes that 16K or 1M are. Raises ValueError."""
    units = {"K": 1 << 10, "M": 1 << 20}
    return int(text[:-1]) * units[text[-1].upper()] if text[-1:].upper() in units else int(text)
