"""What was measured on one device, in a file that plans read: `pannier bench device` writes it."""

from pathlib import Path

import msgspec

from pannier.runtime.errors import ConfigError


class GemmRate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A matrix of weights, larger than the caches, by so many rows: bytes of weights, and FLOP, per second."""

    dtype: str
    rows: int
    threads: int
    bytes_per_s: float
    flops: float


class LinkRate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A round trip of so many bytes each way over one kind of link."""

    kind: str
    size: int
    round_trip_s: float


class ModelTime(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of a step of one model's own slices with so many rows, attention left out."""

    model: str
    dtype: str
    threads: int
    rows: int
    seconds: float


class AttentionTime(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of one attention call of a model, its K and V stored first; `is_shared`: another one ran beside it."""

    model: str
    dtype: str
    threads: int
    rows: int
    context: int
    seconds: float


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rates as achieved on one device, and when and how."""

    accelerator: str
    """Its name in the catalogue, or that of the processor."""
    source: str
    threads: int
    memory_bytes: float
    read_bytes_per_s: float
    """A stream of reads, larger than the caches."""
    read_by_threads: dict[int, float] = {}
    shared_read_bytes_per_s: float | None = None
    """One thread's, while another one reads as well."""
    attention_bytes_per_s: float
    """K and V that attention reads, of a long context."""
    cast_bytes_per_s: dict[str, float] = {}
    """By "from-to"; what is read and what is written, together."""
    gemms: list[GemmRate] = []
    links: list[LinkRate] = []
    models: list[ModelTime] = []
    attention: list[AttentionTime] = []
    step_overhead_s: float = 0.0
    """Of one lane-step, outside slices, attention and links: planning, messages, drawing."""

    def flops(self, dtype: str) -> float | None:
        """The best rate of the dtype; None if it wasn't measured."""
        return max((each.flops for each in self.gemms if each.dtype == dtype), default=None)


def read_profile(path: Path) -> Profile:
    """A profile's file. Raises `ConfigError`."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Profile)
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is no profile of pannier bench device: {error}") from error


def write_profile(path: Path, profile: Profile) -> None:
    """Into a file that `read_profile` reads."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n")
