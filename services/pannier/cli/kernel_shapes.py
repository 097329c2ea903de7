"""What `pannier bench kernel` runs the operators on, and how many bytes and products that takes."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["decode", "past", "chunk", "store", "merge"]
WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8_e4m3fn": 1}
"""Bytes of an element."""
SCALE_WIDTH = 4
SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float8_e4m3fn": "fp8"}
BLOCK_SIZE = 64
STREAM, GEMM = "read stream", "bf16 GEMM"


@dataclass(frozen=True)
class Heads:
    """Geometry of one attention call."""

    q_heads: int
    kv_heads: int
    size: int

    def __str__(self) -> str:
        return f"{self.q_heads}/{self.kv_heads}x{self.size}"


@dataclass(frozen=True)
class Shape:
    """One call of an operator.

    decode: a row of each sequence over its stored keys; past: a chunk of rows over them; chunk: causal attention inside
    chunks; store: rows into blocks; merge: two partials of each row.
    """

    kind: Kind
    sequences: int
    rows: int
    keys: int
    heads: Heads
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        """For people and for the long form."""
        rows = f"{self.sequences} x {self.rows} rows" if self.sequences > 1 else f"{self.rows} rows"
        what = {
            "decode": f"decode {self.sequences} x {self.keys} keys",
            "past": f"{rows} over a past of {self.keys}",
            "chunk": f"chunks of {rows}",
            "store": f"store {rows}",
            "merge": f"merge {rows}",
        }
        return f"{what[self.kind]}, {self.heads} {SHORT.get(self.dtype, self.dtype)}"

    @property
    def stored_bytes(self) -> int:
        """Keys and values of one call, as they are stored, and their scales if they have some."""
        row = self.heads.size * WIDTHS[self.dtype] + SCALE_WIDTH * self.has_scales
        return self.sequences * self.keys * self.heads.kv_heads * 2 * row

    @property
    def has_scales(self) -> bool:
        """Whether keys and values are multiples of scales: those of 8 bits."""
        return WIDTHS[self.dtype] == 1

    @property
    def bytes(self) -> int:
        """Read and written once each; attention outputs and log-sum-exps are fp32."""
        rows, width = self.sequences * self.rows, WIDTHS[self.dtype]
        queries, keys = rows * self.heads.q_heads, rows * self.heads.kv_heads
        partials = queries * (self.heads.size + 1) * 4
        match self.kind:
            case "decode" | "past":
                return self.stored_bytes  # beside which the rows are little
            case "chunk":
                return (queries + 2 * keys) * self.heads.size * width + partials
            case "store":
                return 2 * 2 * keys * self.heads.size * width
            case "merge":
                return 3 * partials

    @property
    def flops(self) -> int:
        """Of both products of attention; a multiplication and an addition are two."""
        seen = {"decode": self.keys, "past": self.rows * self.keys, "chunk": self.rows * (self.rows + 1) // 2}
        return seen.get(self.kind, 0) * self.sequences * self.heads.q_heads * self.heads.size * 4

    @property
    def ceiling(self) -> str:
        """What the operator could do at most: read, or multiply."""
        return GEMM if self.kind in ("past", "chunk") else STREAM

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.flops / self.bytes


LARGE = (Heads(32, 8, 128), Heads(32, 8, 64))
SMALL = Heads(9, 3, 64)
GROUPS: dict[str, tuple[Shape, ...]] = {
    "decode": tuple(Shape("decode", 32, 1, keys, heads) for heads in LARGE for keys in (1024, 4096, 16384)),
    "long": tuple(Shape("decode", 1, 1, 65536, heads) for heads in LARGE),
    "past": tuple(Shape("past", 1, 512, 4096, heads) for heads in LARGE),
    "chunk": tuple(Shape("chunk", 1, rows, 0, heads) for rows in (512, 2048) for heads in LARGE),
    "dtypes": tuple(Shape("decode", 32, 1, 4096, LARGE[0], dtype) for dtype in WIDTHS if dtype != "bfloat16"),
    "step": (
        Shape("decode", 32, 1, 200, SMALL),
        Shape("past", 4, 16, 1000, SMALL),
        Shape("chunk", 4, 128, 0, SMALL),
        Shape("chunk", 32, 16, 0, SMALL),
        Shape("store", 32, 1, 200, SMALL),
        Shape("store", 4, 128, 200, SMALL),
        Shape("merge", 4, 128, 0, SMALL),
    ),
}
"""By what `--shapes` calls them; `step` has those of a small model's steps."""
