"""Configuration: three sources, nothing unknown, and sentences that name what is wrong."""

from pathlib import Path

import pytest

from pannier.runtime.config import AttentionConfig, ComputeConfig, GatewayConfig, RoleConfig, load, to_toml
from pannier.runtime.errors import ConfigError


def write(folder: Path, text: str) -> Path:
    file = folder / "role.toml"
    file.write_text(text)
    return file


def test_flags_win_over_environment_over_file(tmp_path: Path) -> None:
    """Each source overrides the ones before it, key by key."""
    file = write(tmp_path, 'model = "m"\nqueue = 1\nmax_sequences = 1\nmax_waiting = 1\n')
    environ = {"PANNIER_GATEWAY_QUEUE": "2", "PANNIER_GATEWAY_MAX_SEQUENCES": "2", "PANNIER_COMPUTE_QUEUE": "9"}
    config = load(GatewayConfig, file, {"queue": 3, "max_waiting": None}, environ)
    assert (config.queue, config.max_sequences, config.max_waiting) == (3, 2, 1)


@pytest.mark.parametrize(
    "config",
    [
        GatewayConfig(model='a "quoted" \\ name', heads_split=(5, 3), insecure=True, heartbeat_s=0.25),
        ComputeConfig(model="m", cache_dir=Path("/tmp/x"), monolithic=True, attention_memory="2GiB"),
        AttentionConfig(memory="300MB", listen="ipc:///tmp/socket", keys=Path("keys"), encrypt="control"),
    ],
    ids=lambda config: config.role,
)
def test_a_written_file_reads_back_as_the_same_configuration(tmp_path: Path, config: RoleConfig) -> None:
    """`pannier serve` hands configurations to its children as files."""
    assert load(type(config), write(tmp_path, to_toml(config)), environ={}) == config


def test_memory_has_units() -> None:
    """A size is bytes, whatever unit it was given in."""
    assert load(AttentionConfig, flags={"memory": "2GiB"}, environ={}).memory == 2 << 30


@pytest.mark.parametrize(
    ("given", "tokens"), [("300", 300), (300, 300), ("4k", 4000), ("4K", 4096), ("auto", None), (-1, None)]
)
def test_lengths_are_said_as_to_vllm(given: object, tokens: int | None) -> None:
    assert load(GatewayConfig, flags={"model": "m", "max_model_len": given}, environ={}).max_model_len == tokens


@pytest.mark.parametrize(
    ("kind", "values", "sentence"),
    [
        (GatewayConfig, {}, "gateway needs the setting 'model'"),
        (GatewayConfig, {"model": "m", "max_model_len": "4M"}, "max_model_len is '4M'; it must be a valid integer"),
        (
            GatewayConfig,
            {"model": "m", "max_model_len": 1},
            "max_model_len is 1; it must be greater than or equal to 2",
        ),
        (GatewayConfig, {"model": "m", "max_batch_tokens": 0}, "max_batch_tokens is 0; it must be greater than 0"),
        (
            GatewayConfig,
            {"model": "m", "max_batch_tokens": 32},
            "gateway: max_sequences is 64; it must be at most max_batch_tokens, 32",
        ),
        (AttentionConfig, {"encrypt": "control"}, "attention: encrypt is 'control', which needs keys; pannier keys"),
        (AttentionConfig, {"encrypt": "some"}, "encrypt is 'some'; it must be 'all', 'control' or 'none'"),
        (ComputeConfig, {"model": "m", "flows": 0}, "flows is 0; it must be greater than or equal to 1"),
        (
            ComputeConfig,
            {"model": "m", "link": "tcp", "keys": "keys"},
            "compute: link is 'tcp', which can't be encrypted, and keys were given; use zmq, or encrypt = \"control\"",
        ),
        (AttentionConfig, {"listen_tcp": "ipc:///tmp/a"}, "listen_tcp is 'ipc:///tmp/a'; it must be tcp://HOST:PORT"),
        (GatewayConfig, {"model": "m", "block_size": 20}, "block_size is 20; it must be 16, 32 or 64"),
        (
            GatewayConfig,
            {"model": "m", "kv_dtype": "int4"},
            "kv_dtype is 'int4'; it must be 'auto', 'float32', 'bfloat16', 'float16', 'int8' or 'fp8'",
        ),
        (
            GatewayConfig,
            {"model": "m", "prefix_cache": "perhaps"},
            "prefix_cache is 'perhaps'; it must be true or false",
        ),
        (GatewayConfig, {"model": "m", "policy": "lifo"}, "policy is 'lifo'; it must be 'fcfs' or 'priority'"),
        (GatewayConfig, {"model": "m", "heads_split": "5,0"}, "heads_split is '0'; it must be greater than 0"),
        (ComputeConfig, {"model": "m", "device": "gpu"}, "device is 'gpu'; it must be cpu or cuda:NUMBER"),
        (ComputeConfig, {"model": "m", "dtype": "int8"}, "dtype is 'int8'; it must be 'auto', 'float32', 'bfloat16'"),
        (AttentionConfig, {"memory": "much"}, "memory is 'much'; it must be"),
        (AttentionConfig, {"listen": "5151"}, "listen is '5151'; it must be tcp://HOST:PORT or ipc://PATH"),
        (AttentionConfig, {"nmae": "x"}, "attention has no setting 'nmae'; it has cores, device, dtype_strict"),
    ],
)
def test_bad_input_gets_one_sentence(kind: type[RoleConfig], values: dict[str, object], sentence: str) -> None:
    """Field, value and what is legal."""
    with pytest.raises(ConfigError) as caught:
        load(kind, flags=values, environ={})
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_environment_keys_are_refused() -> None:
    """A misspelt variable is not silently without effect."""
    with pytest.raises(ConfigError, match="no setting 'max_sequence'"):
        load(GatewayConfig, flags={"model": "m"}, environ={"PANNIER_GATEWAY_MAX_SEQUENCE": "4"})


@pytest.mark.parametrize(("text", "sentence"), [(None, "can't read"), ("a = ", "is not TOML")])
def test_a_bad_file_is_named(tmp_path: Path, text: str | None, sentence: str) -> None:
    """Missing and malformed files are one sentence too."""
    file = tmp_path / "missing.toml" if text is None else write(tmp_path, text)
    with pytest.raises(ConfigError, match=sentence) as caught:
        load(GatewayConfig, file, environ={})
    assert str(file) in str(caught.value)
