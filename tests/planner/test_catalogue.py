import json
from pathlib import Path

import pytest

from pannier.planner.catalogue import GB, TERA, expectation, load_catalogue
from pannier.planner.devices import IDEAL, Shares, choose_dtype, kind_of
from pannier.planner.profile import GemmRate, Profile, read_profile, write_profile
from pannier.runtime.errors import ConfigError

CATALOGUE = load_catalogue()
PROFILE = Profile(
    accelerator="L4",
    source="a test",
    threads=1,
    memory_bytes=20 << 30,
    read_bytes_per_s=240e9,
    attention_bytes_per_s=200e9,
    gemms=[GemmRate(dtype="float16", rows=64, threads=1, bytes_per_s=1e9, flops=80e12)],
)


def test_families_are_what_they_are_rather_than_what_their_names_suggest() -> None:
    """G5g is a T4G on Graviton2, G5 an A10G, G6 an L4, G6e an L40S; who expects otherwise is told."""
    accelerators = {name: CATALOGUE.instance(f"{name}.xlarge").accelerator for name in ("g5g", "g5", "g6", "g6e")}
    assert accelerators == {"g5g": "T4G", "g5": "A10G", "g6": "L4", "g6e": "L40S"}
    assert CATALOGUE.instance("g5g.xlarge").cpu == "aarch64/aws"
    assert "T4G" in (expectation("g5g.2xlarge") or "")
    assert "Graviton2" in (expectation("g5g.2xlarge") or "")
    assert "L4" in (expectation("g6.xlarge") or "")
    assert expectation("p5.48xlarge") is None


def test_prices_say_where_and_when_and_rows_say_from_where() -> None:
    assert "us-east-1, 2026-07-20" in CATALOGUE.prices
    assert all(each.source for each in CATALOGUE.accelerators.values())
    assert CATALOGUE.instance("g6.xlarge").usd_per_hour == 0.8048
    assert all(each.accelerator in CATALOGUE.accelerators for each in CATALOGUE.instances.values())


def test_what_is_not_established_stays_unknown_and_is_asked_for() -> None:
    """Turing has no bfloat16; nobody says what a part of an L4 reads, or what p5e costs."""
    assert CATALOGUE.accelerator("T4G").flops("bfloat16") is None
    assert "bfloat16" not in CATALOGUE.accelerator("T4").native
    with pytest.raises(ConfigError, match="part of an L4"):
        kind_of(CATALOGUE, "g6f.xlarge", "float16")
    with pytest.raises(ConfigError, match=r"p5e.48xlarge: its price isn't established"):
        kind_of(CATALOGUE, "p5e.48xlarge", "float16")
    with pytest.raises(ConfigError, match="memory bandwidth isn't established"):
        kind_of(CATALOGUE, "g7.2xlarge", "float16")


def test_usable_memory_is_the_least_that_anybody_reports() -> None:
    """EC2 says 16 GiB of a T4G, which itself says 15; of an L4 EC2 says less than its name."""
    assert kind_of(CATALOGUE, "g5g.xlarge", "float16", IDEAL).device.memory_bytes == pytest.approx(0.9 * 15 * 2**30)
    assert kind_of(CATALOGUE, "g6.xlarge", "float16", IDEAL).device.memory_bytes == pytest.approx(0.9 * 22888 * 2**20)


def test_a_measured_read_limits_what_a_share_may_promise() -> None:
    """A T4G reads 277 GB/s of its 320, however ideal the shares."""
    assert kind_of(CATALOGUE, "g5g.xlarge", "float16", IDEAL).device.kv_bandwidth == 277 * GB
    assert kind_of(CATALOGUE, "g5g.xlarge", "float16").device.kv_bandwidth == 0.8 * 320 * GB


def test_devices_of_one_instance_share_its_price_and_network() -> None:
    kind = kind_of(CATALOGUE, "p5.48xlarge", "bfloat16", Shares())
    assert kind.usd_per_hour == pytest.approx(55.04)
    assert kind.device.network == pytest.approx(400e9 / 8)
    assert kind.device.flops == pytest.approx(0.45 * 989 * TERA)


def test_a_measured_profile_wins_over_the_catalogue() -> None:
    """For every instance with that accelerator, and no other; nothing is scaled down that was measured."""
    device = kind_of(CATALOGUE, "g6.xlarge", "float16", Shares(), (PROFILE,)).device
    assert (device.weight_bandwidth, device.kv_bandwidth, device.flops) == (240e9, 200e9, 80e12)
    assert device.memory_bytes == pytest.approx(0.9 * 20 * 2**30)
    other = kind_of(CATALOGUE, "g6e.xlarge", "float16", Shares(), (PROFILE,))
    assert other == kind_of(CATALOGUE, "g6e.xlarge", "float16")


def test_a_profile_comes_back_as_it_was_written(tmp_path: Path) -> None:
    write_profile(tmp_path / "p.json", PROFILE)
    assert read_profile(tmp_path / "p.json") == PROFILE
    (tmp_path / "bad.json").write_text('{"accelerator": 1}')
    with pytest.raises(ConfigError, match=r"bad.json is no profile"):
        read_profile(tmp_path / "bad.json")


def test_a_file_changes_single_fields_and_adds_rows(tmp_path: Path) -> None:
    """What it doesn't say stays; prices then name the file, its region and its date."""
    path = tmp_path / "own.json"
    rows = [{"name": "g6.xlarge", "usd_per_hour": 0.5}, {"name": "own.rig", "accelerator": "L4", "usd_per_hour": 0.1}]
    path.write_text(json.dumps({"instances": rows, "region": "attic", "date": "2026-12-01"}))
    catalogue = load_catalogue(path)
    assert catalogue.instance("g6.xlarge").usd_per_hour == 0.5
    assert catalogue.instance("g6.xlarge").network_mbps == 2500
    assert catalogue.instance("own.rig").accelerator == "L4"
    assert "own.json: attic, 2026-12-01" in catalogue.prices
    assert CATALOGUE.instance("g6.xlarge").usd_per_hour == 0.8048


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"instances": [{"name": "g6.xlarge", "usd": 1}]}', "unknown field `usd`"),
        ('{"instances": [{"name": "new"}]}', "missing required field `accelerator`"),
        ('{"instances": [{"name": "g6.xlarge", "usd_per_hour": -1}]}', "> 0"),
        ("nonsense", "malformed"),
    ],
)
def test_a_file_that_cannot_be_right_is_refused(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(ConfigError, match=says):
        load_catalogue(tmp_path / "bad.json")


def test_unknown_names_say_which_there_are() -> None:
    with pytest.raises(ConfigError, match=r"'g6.huge'; it has g6.xlarge"):
        CATALOGUE.instance("g6.huge")
    with pytest.raises(ConfigError, match="no accelerator 'L5'"):
        CATALOGUE.accelerator("L5")


def test_the_dtype_is_the_one_that_nobody_has_to_convert() -> None:
    kinds = [("L4", CATALOGUE.accelerator("L4").native), ("T4G", CATALOGUE.accelerator("T4G").native)]
    assert choose_dtype(kinds[:1], "auto")[0] == "bfloat16"
    assert choose_dtype(kinds, "auto") == ("float16", "T4G would have to convert bfloat16")
    assert choose_dtype(kinds, "bfloat16")[0] == "bfloat16"
