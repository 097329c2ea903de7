"""Keeps what slicing found, so that the next start needs no trace: source, one JSON page, and small tensors.

An entry is a folder that appears whole or not at all. Its source is run by whoever loads it, so it must belong to this
user, nobody else may have been able to write to it, and it must have the hash that the page states.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from pannier.slicer.cut import Call, Cut, Slice

PAGE, SOURCE, CONSTANTS = "slices.json", "slices.py", "constants.safetensors"
# What a configuration says about where it came from, not about the model.
PROVENANCE = {"_name_or_path", "architectures", "transformers_version"}


class Untrusted(Exception):
    """Raised for a cache entry that someone else may have written, or that has changed since we wrote it."""


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/pannier`, else `~/.cache/pannier`, else a folder of this user among the temporary files."""
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "pannier"
    home = os.path.expanduser("~")
    if os.path.isabs(home) and os.path.isdir(home):
        return Path(home) / ".cache" / "pannier"
    return Path(tempfile.gettempdir()) / f"pannier-{os.getuid()}"


def key_of(config: Mapping[str, Any], **others: object) -> str:
    """A hash over a whole configuration, everything in `others`, and the versions of all that has a part in slicing."""
    described = {name: value for name, value in config.items() if name not in PROVENANCE}
    text = json.dumps([described, others, versions()], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def versions() -> dict[str, str]:
    """The versions of torch and transformers, and a hash over the slicer's own sources."""
    ours = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        ours.update(path.read_bytes())
    return {"torch": torch.__version__, "transformers": transformers.__version__, "slicer": ours.hexdigest()}


def store_cut(folder: Path, cut: Cut) -> None:
    """Writes `cut` as the cache entry `folder`, in place of any that is there.

    Raises:
        OSError: the cache can't be written.
    """
    constants = save_tensors({name: tensor.detach().cpu().contiguous() for name, tensor in cut.constants.items()})
    page = {
        "calls": [asdict(call) for call in cut.calls],
        "slices": [asdict(piece) for piece in cut.slices],
        "vocab_size": cut.vocab_size,
        "versions": versions(),
        "sha256": {SOURCE: _sha256(cut.source.encode()), CONSTANTS: _sha256(constants)},
    }
    _write_folder(
        folder, {SOURCE: cut.source.encode(), CONSTANTS: constants, PAGE: json.dumps(page, indent=1).encode()}
    )


def load_cut(folder: Path) -> Cut | None:
    """The cut that was stored as `folder`; None if there is none.

    Raises:
        Untrusted: it isn't certain that what is there is what we wrote.
    """
    if not folder.exists():
        return None
    page = json.loads(read_own(folder / PAGE))
    content = {name: read_own(folder / name) for name in (SOURCE, CONSTANTS)}
    for name, data in content.items():
        if _sha256(data) != page["sha256"][name]:
            raise Untrusted(f"{folder / name} has changed since it was written")
    return Cut(
        calls=tuple(Call(**call) for call in page["calls"]),
        slices=tuple(_slice(piece) for piece in page["slices"]),
        source=content[SOURCE].decode(),
        constants=load_tensors(content[CONSTANTS]),
        vocab_size=page["vocab_size"],
    )


def read_own(path: Path) -> bytes:
    """Reads a file that only this user can have written, in a folder of which the same holds.

    Raises:
        Untrusted: the file is missing, or others may have written it.
    """
    try:
        with path.open("rb") as file:
            for status in (os.fstat(file.fileno()), path.parent.stat()):
                if status.st_uid != os.geteuid() or status.st_mode & 0o022:
                    raise Untrusted(f"{path} may have been written by someone else")
            return file.read()
    except OSError as error:
        raise Untrusted(f"{path} can't be read ({error.strerror})") from error


def write_own(path: Path, content: bytes) -> None:
    """Writes a file that only this user can read, whole or not at all.

    Raises:
        OSError: the cache can't be written.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
    os.replace(temporary, path)


def _write_folder(folder: Path, content: dict[str, bytes]) -> None:
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        for name, data in content.items():
            write_own(temporary / name, data)
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _slice(page: dict[str, Any]) -> Slice:
    fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in page.items()}
    return Slice(**fields)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
