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


class SliceTime(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of all slices of a model for a step of so many rows, and of drawing; attention left out."""

    model: str
    dtype: str
    threads: int
    rows: int
    is_shared: bool
    """Whether another process read from memory all the while, as an attention worker does."""
    seconds: float


class AttentionTime(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of one attention call of a model, for so many decode rows that each see so many tokens."""

    model: str
    dtype: str
    threads: int
    rows: int
    context: int
    is_shared: bool
    seconds: float


class EngineCost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the engine itself takes beside slices, attention and links: of each call, and of each lane-step."""

    is_monolithic: bool
    call_s: float
    step_s: float


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
    slices: list[SliceTime] = []
    attention: list[AttentionTime] = []
    engine: list[EngineCost] = []

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
