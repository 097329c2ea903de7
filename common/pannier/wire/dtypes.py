"""The closed table of element types that may cross a process boundary."""

from enum import StrEnum

SCALE_BYTES = 4


class Dtype(StrEnum):
    """Element type of a tensor part. The value is what the header carries."""

    FLOAT32 = "f32"
    BFLOAT16 = "bf16"
    FLOAT16 = "f16"
    FLOAT8_E4M3 = "f8e4m3"
    INT8 = "i8"
    INT32 = "i32"
    INT64 = "i64"
    BOOL = "b8"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _ITEMSIZE[self]

    @property
    def has_scales(self) -> bool:
        """Whether keys and values in it are multiples of a scale, in fp32, that each token's own of one head has."""
        return self in (Dtype.FLOAT8_E4M3, Dtype.INT8)

    def stored_bytes(self, size: int) -> int:
        """Bytes of one token's key, or value, of one head of that size in a KV block."""
        return size * self.itemsize + (SCALE_BYTES if self.has_scales else 0)


_ITEMSIZE = {
    Dtype.FLOAT32: 4,
    Dtype.BFLOAT16: 2,
    Dtype.FLOAT16: 2,
    Dtype.FLOAT8_E4M3: 1,
    Dtype.INT8: 1,
    Dtype.INT32: 4,
    Dtype.INT64: 8,
    Dtype.BOOL: 1,
}
