"""Configuration: one frozen model per role, read once from a TOML file, the environment and flags.

Later sources win: file, then environment (`PANNIER_GATEWAY_MAX_SEQUENCES`), then flags. Unknown keys are refused.
What a process learns as it starts (memory, geometry) is never written back here.
"""

import ipaddress
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    StringConstraints,
    ValidationError,
    model_validator,
)

from pannier.net.shm import SPIN_US
from pannier.runtime.errors import ConfigError

DtypeName: TypeAlias = Literal["auto", "float32", "bfloat16", "float16"]
"""Element types by their names in torch; auto is what the device computes natively and the model allows."""

KvDtypeName: TypeAlias = Literal["auto", "float32", "bfloat16", "float16", "int8", "fp8"]
"""K and V also in 8 bits, with a scale for each token and head; fp8 is e4m3. Never chosen by auto: they are rounded."""

LinkKind: TypeAlias = Literal["auto", "shm", "tcp", "zmq"]
"""How a compute worker reaches attention workers: shared memory, plain TCP, ZeroMQ, or the first that each allows."""


Encrypt: TypeAlias = Literal["all", "control", "none"]
"""What keys are used for: everything, everything but the links of compute and attention workers, or nothing."""


def _listed(value: object) -> object:
    return value.split(",") if isinstance(value, str) else value


EmulatedTime: TypeAlias = Annotated[
    tuple[Annotated[float, Field(ge=0)], ...], BeforeValidator(_listed), Field(min_length=1, max_length=2)
]
"""Of one lane-step on a device that isn't there, as in "20,5": milliseconds, and microseconds for every row."""


def _tokens(value: object) -> object:
    """Lengths as vLLM takes them: "4k" is 4,000 and "4K" 4,096; "auto" and -1 are None."""
    if value in ("auto", "-1", -1):
        return None
    if isinstance(value, str) and value[-1:] in ("k", "K") and value[:-1].isdecimal():
        return int(value[:-1]) * (1000 if value.endswith("k") else 1024)
    return value


MaxModelLen: TypeAlias = Annotated[Annotated[int, Field(ge=2)] | None, BeforeValidator(_tokens)]
"""Tokens of prompt and completion together; None: as many as the model's window and the KV cache allow."""
Endpoint: TypeAlias = Annotated[str, StringConstraints(pattern=r"^(tcp://.+:\d+|ipc://.+)$")]
TcpEndpoint: TypeAlias = Annotated[str, StringConstraints(pattern=r"^tcp://.+:\d+$")]
HttpUrl: TypeAlias = Annotated[str, StringConstraints(pattern=r"^https?://.+$")]
Device: TypeAlias = Annotated[str, StringConstraints(pattern=r"^(cpu|cuda:\d+)$")]
Name: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
DtypeNames: TypeAlias = Annotated[
    tuple[Literal["float32", "bfloat16", "float16"], ...], BeforeValidator(_listed), Field(min_length=1)
]
HeadsSplit: TypeAlias = Annotated[tuple[PositiveInt, ...], BeforeValidator(_listed)]


def _numbered(value: object) -> object:
    """Numbers from text such as "0-3,8"; what is none is left for pydantic to refuse."""
    if not isinstance(value, str):
        return value
    numbers: list[object] = []
    for part in value.split(","):
        first, dash, last = part.partition("-")
        numbers += range(int(first), int(last) + 1) if dash and first.isdecimal() and last.isdecimal() else [part]
    return numbers


Cores: TypeAlias = Annotated[tuple[NonNegativeInt, ...], BeforeValidator(_numbered), Field(min_length=1)]
"""Numbers of CPU cores, as in "0-3,8"."""


class RoleConfig(BaseModel):
    """What all roles have."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    role: ClassVar[str]

    queue: PositiveInt = 64
    """High-water mark of every socket, in messages each way."""
    insecure: bool = False
    """Allow addresses that other hosts can reach, in the clear."""
    keys: Path | None = None
    """A folder that `pannier keys` has made, or what this role needs of it; None: nothing is encrypted."""
    encrypt: Encrypt | None = None
    """Workers of one stack must agree; None: all where there are keys."""
    otlp_endpoint: HttpUrl | None = None
    """An OpenTelemetry collector that gets traces, as in "http://127.0.0.1:4318"; None: as OTEL_EXPORTER_OTLP_ENDPOINT
    and its kin say, none without them."""

    @property
    def used_keys(self) -> Path | None:
        """The folder of keys, if any are used."""
        return None if self.encrypt == "none" else self.keys

    @property
    def encrypts_links(self) -> bool:
        """Whether they are used between compute and attention workers too."""
        return self.used_keys is not None and self.encrypt != "control"

    @model_validator(mode="after")
    def _keys_are_given(self) -> Self:
        if self.keys is None and self.encrypt in ("all", "control"):
            raise ValueError(f"encrypt is {self.encrypt!r}, which needs keys; pannier keys makes them")
        return self


class GatewayConfig(RoleConfig):
    """One gateway: the model whose text it speaks, where it listens, and how it fills steps."""

    role: ClassVar[str] = "gateway"

    model: str
    served_model_name: str | None = None
    """What clients call the model; None: the model's own name."""
    control_endpoint: Endpoint = "tcp://127.0.0.1:5150"
    client_endpoint: Endpoint = "tcp://127.0.0.1:5151"
    data_endpoint: Endpoint = "tcp://127.0.0.1:0"
    """Workers are told the real one, so port 0 is fine."""
    compute_workers: PositiveInt = 1
    attention_workers: PositiveInt = 1
    """How many workers to wait for before groups are formed and requests are served."""
    max_batch_tokens: PositiveInt = 512
    """Rows of one step, decode rows included."""
    max_sequences: PositiveInt = 64
    """Sequences that run at once."""
    max_waiting: PositiveInt = 1024
    """Requests that may wait; more are refused as overloaded."""
    policy: Literal["fcfs", "priority"] = "fcfs"
    """Who goes first: who came first, or who has the smaller priority number."""
    prefix_cache: bool = True
    """Keep the KV blocks of what was computed, and share them among prompts that begin alike."""
    max_model_len: MaxModelLen = None
    block_size: Literal[16, 32, 64] = 64
    """Tokens per KV block."""
    emulate_past: bool = False
    """Take prompts for stored instead of having them computed: what is drawn then means nothing."""
    heads_split: HeadsSplit | None = None
    """KV heads per attention worker, as in "5,3"; None: planned from memory and bandwidth."""
    kv_dtype: KvDtypeName = "auto"
    heartbeat_s: PositiveFloat = 1.0

    @model_validator(mode="after")
    def _decode_rows_fit(self) -> Self:
        if self.max_sequences > self.max_batch_tokens:
            raise ValueError(
                f"max_sequences is {self.max_sequences}; it must be at most max_batch_tokens, {self.max_batch_tokens}"
            )
        return self


class ComputeConfig(RoleConfig):
    """One compute worker: a model on a device."""

    role: ClassVar[str] = "compute"

    model: str
    name: Name = "compute-0"
    gateway: Endpoint = "tcp://127.0.0.1:5150"
    """The gateway's control endpoint."""
    device: Device = "cpu"
    dtype: DtypeName = "auto"
    dtype_strict: bool = False
    """Fail a step in which weights, K, V or what links carry are converted, instead of counting that."""
    lanes: Annotated[int, Field(ge=1, le=8)] = 2
    max_model_len: MaxModelLen = None
    """Freezes rotary variants that depend on the longest position; None: the model's window."""
    threads: PositiveInt | None = None
    """CPU threads of the slices; None: torch's choice."""
    cores: Cores | None = None
    """The only CPU cores that this process runs on, as in "0-3,8"; None: any."""
    cache_dir: Path | None = None
    """Where sliced graphs are kept; None: the user's cache folder."""
    link: LinkKind = "auto"
    flows: Annotated[int, Field(ge=1, le=16)] = 1
    """Connections of a link that goes over a network, where that gives each of them a part of its rate."""
    spin_us: NonNegativeInt = SPIN_US
    """How long to look for an answer before going to sleep, while cores are free; 0: not at all."""
    stage: NonNegativeInt = 0
    """Which part of the model's slices this worker runs, counted from 0."""
    stages: PositiveInt = 1
    """Parts that the model is divided into, each on a compute worker of its own with `lanes` lanes for every part."""
    listen: Endpoint = "tcp://127.0.0.1:0"
    """Where the worker of the stage before reaches this one; it is told the real one, so port 0 is fine."""
    monolithic: bool = False
    """Attention in this process too: the homogeneous baseline."""
    attention_memory: ByteSize | None = None
    """Bytes for KV blocks when monolithic, as in "2GiB"; None: a share of what is free."""
    timeline: Path | None = None
    """Where to write what the lanes did, once the worker ends."""
    emulate_compute: EmulatedTime | None = None
    """Waits for so long instead of computing. What is sent has the model's shapes; results mean nothing."""
    emulate_rate: PositiveFloat = 1.0
    """When monolithic, as an attention worker's; and so are the next two."""
    emulate_attention: EmulatedTime | None = None
    emulate_past: bool = False
    emulate_dtypes: DtypeNames | None = None
    """As if the device computed, beside float32, only these natively."""

    @model_validator(mode="after")
    def _stage_is_one(self) -> Self:
        if self.stage >= self.stages:
            raise ValueError(f"stage is {self.stage} and stages {self.stages}; stages are counted from 0")
        if self.stages > 1 and self.monolithic:
            raise ValueError("a monolithic worker runs the whole model; use stages only with attention workers")
        if self.stages > 1 and self.emulate_compute is not None:
            raise ValueError("emulate_compute stands in for a whole model; it can't be used with stages")
        return self

    @model_validator(mode="after")
    def _link_is_encrypted_if_links_are(self) -> Self:
        if self.link == "tcp" and self.encrypts_links:
            raise ValueError(
                "link is 'tcp', which can't be encrypted, and keys were given; use zmq, or encrypt = \"control\" on a "
                "network that is private"
            )
        return self


class AttentionConfig(RoleConfig):
    """One attention worker: a device and the memory that its KV blocks may take."""

    role: ClassVar[str] = "attention"

    name: Name = "attention-0"
    gateway: Endpoint = "tcp://127.0.0.1:5150"
    """The gateway's control endpoint."""
    device: Device = "cpu"
    memory: ByteSize | None = None
    """Bytes for KV blocks, as in "2GiB"; None: a share of what is free."""
    dtype_strict: bool = False
    """Fail a step in which K, V or what links carry are converted, instead of counting that."""
    listen: Endpoint = "tcp://127.0.0.1:0"
    """Where compute workers reach it; they are told the real one, so port 0 is fine."""
    listen_tcp: TcpEndpoint | None = None
    """Where they reach it over plain TCP if links are not encrypted; None: any port beside `listen`."""
    spin_us: NonNegativeInt = SPIN_US
    """As a compute worker's: how long to look for a request before going to sleep."""
    threads: PositiveInt | None = None
    """CPU threads of the attention operator; None: torch's choice."""
    cores: Cores | None = None
    """The only CPU cores that this process runs on, best those next to the memory that it reads; None: any."""
    emulate_rate: PositiveFloat = 1.0
    """How fast attention is beside what it really is here, at most 1: every call waits until it has taken so long."""
    emulate_attention: EmulatedTime | None = None
    """The calls of a lane-step wait until they have taken at least so long together."""
    emulate_delay: Annotated[float, Field(ge=0)] = 0.0
    """Milliseconds by which links are slower, each way."""
    emulate_bandwidth: PositiveFloat | None = None
    """Gbit/s of each compute worker's link and direction, if it has more."""
    emulate_past: bool = False
    """Start with random numbers in all blocks, as the gateway's switch of this name needs them."""
    emulate_dtypes: DtypeNames | None = None
    """As if the device computed, beside float32, only these natively: "float16" is one without bfloat16."""


class HttpConfig(RoleConfig):
    """One HTTP front: where it listens, whom it lets in, and the gateway behind it."""

    role: ClassVar[str] = "http"

    name: Name = "http-0"
    gateway: Endpoint = "tcp://127.0.0.1:5151"
    """The gateway's endpoint for clients."""
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """0: any that is free; the log says which."""
    api_keys: Annotated[tuple[str, ...], BeforeValidator(_listed)] = ()
    """Who sends none of them is turned away; none at all: everybody is let in."""
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    cors_origins: Annotated[tuple[str, ...], BeforeValidator(_listed)] = ()
    """Web pages of these origins may ask, as in "https://chat.example.com"; "*" is all."""
    max_body_bytes: ByteSize = ByteSize(8 << 20)
    keep_alive_s: PositiveFloat = 15.0
    """Silence of a stream after which a comment is sent, so that nobody in between hangs up."""

    @model_validator(mode="after")
    def _is_safe(self) -> Self:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key go together")
        if any(not key for key in self.api_keys):
            raise ValueError("api_keys has an empty one")
        is_guarded = bool(self.api_keys) and self.tls_certificate is not None
        if not _is_loopback(self.host) and not is_guarded and not self.insecure:
            raise ValueError(
                f"host is {self.host!r}, which other hosts can reach; give api_keys and a tls_certificate, or allow it "
                "with insecure behind something that encrypts"
            )
        return self


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


C = TypeVar("C", bound=RoleConfig)


def load(
    kind: type[C],
    file: Path | None = None,
    flags: Mapping[str, object] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> C:
    """The configuration of one role. Flags that are None were not given.

    Raises `ConfigError` naming the field, its value and what is legal.
    """
    given = {name: value for name, value in (flags or {}).items() if value is not None}
    values = {**_from_file(file), **_from_environment(kind, environ), **given}
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_sentence(kind, error)) from error


def to_toml(config: RoleConfig) -> str:
    """The text of a file that `load` reads back as the same configuration."""
    values = config.model_dump(mode="json", exclude_none=True)
    return "".join(f"{name} = {_toml_value(value)}\n" for name, value in values.items())


def _toml_value(value: object) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case list():
            return f"[{', '.join(map(_toml_value, value))}]"
        case _:
            escaped = str(value).translate({ord("\\"): "\\\\", ord('"'): '\\"', ord("\n"): "\\n"})
            return f'"{escaped}"'


def _from_file(file: Path | None) -> dict[str, Any]:
    if file is None:
        return {}
    try:
        return tomllib.loads(file.read_text())
    except OSError as error:
        raise ConfigError(f"can't read the configuration file {file}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration file {file} is not TOML: {error}") from error


def _from_environment(kind: type[RoleConfig], environ: Mapping[str, str]) -> dict[str, str]:
    prefix = f"PANNIER_{kind.role.upper()}_"
    return {key.removeprefix(prefix).lower(): value for key, value in environ.items() if key.startswith(prefix)}


def _sentence(kind: type[RoleConfig], error: ValidationError) -> str:
    """The first thing that is wrong, in one sentence."""
    first = error.errors(include_url=False)[0]
    if not first["loc"]:  # about several fields
        return f"{kind.role}: {first['ctx']['error']}"
    field = str(first["loc"][0])
    match first["type"]:
        case "extra_forbidden":
            return f"{kind.role} has no setting {field!r}; it has {', '.join(sorted(kind.model_fields))}"
        case "missing":
            return f"{kind.role} needs the setting {field!r}"
        case "string_pattern_mismatch":
            legal = _PATTERN_MEANINGS[first["ctx"]["pattern"]]
        case "bool_parsing" | "bool_type":
            legal = "true or false"
        case _:
            legal = first["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    return f"{kind.role}: {field} is {first['input']!r}; it must be {legal}"


_PATTERN_MEANINGS = {
    r"^(tcp://.+:\d+|ipc://.+)$": "tcp://HOST:PORT or ipc://PATH",
    r"^tcp://.+:\d+$": "tcp://HOST:PORT",
    r"^https?://.+$": "http://HOST:PORT or https://HOST:PORT",
    r"^(cpu|cuda:\d+)$": "cpu or cuda:NUMBER",
    r"^[A-Za-z0-9._-]{1,64}$": "1 to 64 letters, digits, dots, dashes or underscores",
}
