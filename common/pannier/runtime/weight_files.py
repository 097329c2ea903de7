"""What a folder's weights are, by the headers of their files: element types and shapes, read in milliseconds."""

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open

NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I8": "int8",
    "U8": "uint8",
}
"""Element types as files spell them, and torch's names."""


@dataclass(frozen=True)
class Stored:
    """A model's weights in files.

    Attributes:
        elements: how many numbers there are of each element type.
        matrices: how many there are of each shape [out, in].
    """

    elements: Counter[str]
    matrices: Counter[tuple[int, int]]

    @property
    def dtype(self) -> str:
        """The type of most; empty where there are none."""
        return self.elements.most_common(1)[0][0] if self.elements else ""

    @property
    def usual_matrix(self) -> tuple[int, int] | None:
        """The shape whose matrices have the most numbers together."""
        return max(self.matrices, key=lambda shape: math.prod(shape) * self.matrices[shape], default=None)


def stored_in(folder: Path) -> Stored:
    """The weights in a folder's *.safetensors files."""
    elements, matrices = Counter[str](), Counter[tuple[int, int]]()
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  # no mapping
                part = tensors.get_slice(name)
                shape = tuple(part.get_shape())
                elements[NAMES.get(part.get_dtype(), part.get_dtype())] += math.prod(shape)
                if len(shape) == 2:
                    matrices[shape[0], shape[1]] += 1
    return Stored(elements, matrices)
