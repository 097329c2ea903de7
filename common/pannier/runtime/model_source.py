"""Where a model comes from, and a digest by which gateway and workers see that they mean the same one.

A specification is one of

- `embedded`: the small model that the package carries,
- `random:SHAPE` or `random:SHAPE:SEED`: random weights (`pannier.runtime.random_models`),
- a folder with config.json and *.safetensors, as transformers saves it,
- `OWNER/NAME` or `OWNER/NAME@REVISION`, if there is no such folder: a repository on a hub (`pannier.runtime.hub`).
"""

import hashlib
import json
import struct
from dataclasses import asdict, dataclass
from pathlib import Path

from pannier.runtime.errors import ModelError
from pannier.runtime.hub import fetch, names_repository
from pannier.runtime.random_models import SHAPES, RandomShape

EMBEDDED = Path(__file__).parent.parent / "models" / "embedded"
MAX_HEADER_BYTES = 100 << 20
UNSERVED = ("*.gguf", "*.bin", "*.pt", "*.pth")
"""Weights of other kinds: of other engines, or pickled."""


@dataclass(frozen=True)
class ModelSource:
    """A model that exists: either a folder, or a random shape with its seed."""

    name: str
    path: Path | None
    shape: RandomShape | None
    seed: int
    digest: str
    """sha256 over configuration, tensor names, shapes and dtypes; not over the weights, which take minutes to read."""


def resolve(specification: str, *, weights: bool = True) -> ModelSource:
    """The source that a specification names; without `weights` those of a hub need not be here. Raises `ModelError`."""
    if specification == "embedded":
        return _folder("embedded", EMBEDDED)
    if specification.startswith("random:"):
        return _random(specification)
    path = Path(specification).expanduser()
    if not path.exists() and names_repository(specification):
        snapshot = fetch(specification, weights=weights)
        if weights:
            _check_folder(snapshot.path)
        return ModelSource(snapshot.repository, snapshot.path, None, 0, snapshot.digest)
    return _folder(path.resolve().name, path)


def _random(specification: str) -> ModelSource:
    _, name, *rest = specification.split(":")
    if name not in SHAPES:
        raise ModelError(f"{specification!r} names no random model; the shapes are {', '.join(SHAPES)}")
    if len(rest) > 1 or not all(seed.isdecimal() for seed in rest):
        raise ModelError(f"{specification!r} is not a random model; write random:{name} or random:{name}:SEED")
    shape, seed = SHAPES[name], int(rest[0]) if rest else 0
    digest = hashlib.sha256(json.dumps([asdict(shape), seed]).encode()).hexdigest()
    return ModelSource(f"random:{name}", None, shape, seed, digest)


def _folder(name: str, path: Path) -> ModelSource:
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise ModelError(
            f"the model folder {str(path)!r} {what}; give a folder as transformers saves it, "
            f"'embedded', or random:SHAPE with one of {', '.join(SHAPES)}"
        )
    weights = _check_folder(path)
    return ModelSource(name, path.resolve(), None, 0, _digest(path / "config.json", weights))


def _check_folder(path: Path) -> list[Path]:
    """The files with weights."""
    if not (path / "config.json").is_file():
        raise ModelError(f"the model folder {str(path)!r} has no config.json")
    weights = sorted(path.glob("*.safetensors"))
    if not weights:
        others = sorted(each.name for kind in UNSERVED for each in path.glob(kind))
        instead = f", only {others[0]}, which can't be served: convert it with transformers first" if others else ""
        raise ModelError(f"the model folder {str(path)!r} has no weights in *.safetensors files{instead}")
    return weights


def _digest(config: Path, weights: list[Path]) -> str:
    digest = hashlib.sha256(config.read_bytes())
    for file in weights:
        digest.update(file.name.encode() + struct.pack("<Q", file.stat().st_size) + _header(file))
    return digest.hexdigest()


def _header(file: Path) -> bytes:
    """The JSON at the start of a safetensors file: name, dtype, shape and place of every tensor."""
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else MAX_HEADER_BYTES + 1
        header = stream.read(length) if length <= MAX_HEADER_BYTES else b""
    if not header or len(header) != length:
        raise ModelError(f"{str(file)!r} is not a safetensors file, or is cut short")
    return header
