"""`pannier bench kernel`: shapes, engines that do the same, and the command as a whole."""

import json
import xml.etree.ElementTree
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from pannier.cli import bench_kernel, kernel_ceilings, kernel_engines
from pannier.cli.__main__ import app
from pannier.cli.kernel_engines import PLANNED_ANEW, engines
from pannier.cli.kernel_report import CONTIGUOUS, MACHINE, OURS, PAGED
from pannier.cli.kernel_shapes import GEMM, GROUPS, STREAM, Heads, Shape
from pannier.runtime.errors import ConfigError
from pannier.runtime.host import Memory

FEW = Heads(4, 2, 16)
SHAPES = (
    Shape("decode", 3, 1, 100, FEW),
    Shape("decode", 3, 1, 100, FEW, "int8"),
    Shape("past", 2, 5, 70, FEW),
    Shape("chunk", 2, 20, 0, FEW),
    Shape("store", 2, 3, 70, FEW),
    Shape("merge", 2, 3, 0, FEW),
)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is larger than a cache here."""
    monkeypatch.setattr(kernel_engines, "UNCACHED_BYTES", 1)
    monkeypatch.setattr(kernel_ceilings, "STREAM_BYTES", 1 << 16)
    monkeypatch.setattr(kernel_ceilings, "SIZE", 64)


def test_bytes_and_operations_are_those_of_attention() -> None:
    """32 sequences of 4096 keys, eight heads of 128: a gigabyte in fp32."""
    shape = Shape("decode", 32, 1, 4096, Heads(32, 8, 128), "float32")
    assert shape.bytes == 32 * 4096 * 8 * 2 * 128 * 4 == 1 << 30
    assert shape.flops == 32 * 4096 * 32 * 128 * 4
    assert shape.ceiling == STREAM
    eight_bits = Shape("decode", 32, 1, 4096, Heads(32, 8, 128), "int8")
    assert eight_bits.bytes == 32 * 4096 * 8 * 2 * (128 + 4)
    chunk = Shape("chunk", 1, 512, 0, Heads(32, 8, 128))
    assert chunk.flops == (512 * 513 // 2) * 32 * 128 * 4
    assert chunk.ceiling == GEMM


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[2], SHAPES[3]], ids=lambda shape: shape.kind)
def test_all_engines_do_the_same(shape: Shape) -> None:
    """To what bf16 allows; ours and each of torch's forms, on the same random numbers."""
    found = engines(shape)
    expected = found.ours[OURS]()
    assert isinstance(expected, torch.Tensor)
    others = {**found.ours, **found.contiguous, **found.paged}
    assert len(others) >= 4
    for name, call in others.items():
        actual = call()
        assert isinstance(actual, torch.Tensor)
        assert (actual.float() - expected).abs().max() < 0.02, name


@pytest.mark.parametrize(
    ("dtype", "offered"),
    [("float32", True), ("bfloat16", True), ("int8", True), ("float8_e4m3fn", True), ("int32", False)],
)
def test_the_operators_say_which_dtypes_they_store(dtype: str, offered: bool) -> None:
    """By a trial, whose answer must be right."""
    assert kernel_engines.is_offered(dtype) == offered


def test_memory_that_is_not_there_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any is taken."""
    monkeypatch.setattr(bench_kernel, "host_memory", lambda: Memory(8 << 30, 4 << 30))
    with pytest.raises(ConfigError, match=r"decode 32 x 16384 keys.* GiB, and 4.0 are free; leave 'decode' out"):
        bench_kernel.check_memory(bench_kernel.listed_shapes("decode,chunk"))
    bench_kernel.check_memory(bench_kernel.listed_shapes("chunk"))


def test_the_command_measures_every_kind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A share of a ceiling for each, torch beside those that it has, one JSON object, one picture."""
    monkeypatch.setattr(bench_kernel, "GROUPS", {"few": SHAPES})
    plot = tmp_path / "roofline.svg"
    options = ["--shapes", "few", "--repeats", "3", "--seconds", "0", "--cpu-time", "--json", "--plot", str(plot)]
    ran = CliRunner().invoke(app, ["bench", "kernel", *options])
    assert ran.exit_code == 0, ran.output
    found = json.loads(ran.stdout.splitlines()[-1])
    rows = {(row["case"], row["engine"], row["metric"]): row for row in found["rows"]}
    for shape in SHAPES:
        metrics = {metric for case, engine, metric in rows if (case, engine) == (shape.name, OURS)}
        assert len(metrics) == 2
        assert all(len(rows[shape.name, OURS, metric]["repeats"]) == 3 for metric in metrics)
    assert {engine for case, engine, _ in rows if case == SHAPES[0].name} == {OURS, PLANNED_ANEW, CONTIGUOUS, PAGED}
    assert {engine for case, engine, _ in rows if case == MACHINE} == {STREAM, GEMM}
    assert {(ratio["of"], ratio["to"]) for ratio in found["ratios"]} >= {(OURS, CONTIGUOUS), (OURS, PAGED)}
    drawn = xml.etree.ElementTree.parse(plot)
    assert len(drawn.findall(".//{*}circle")) == 3 + 4 + 3 + 2  # the roof's corners, then ours, torch's


def test_when_time_is_up_no_shape_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """And those that are left out are named."""
    monkeypatch.setattr(bench_kernel, "GROUPS", {"few": SHAPES})
    ran = CliRunner().invoke(app, ["bench", "kernel", "--shapes", "few", "--seconds", "0", "--budget", "0", "--json"])
    assert ran.exit_code == 0, ran.output
    found = json.loads(ran.stdout.splitlines()[-1])
    assert {row["case"] for row in found["rows"]} == {MACHINE}
    assert all(found["settings"][MACHINE][shape.name].startswith("left out") for shape in SHAPES)


def test_what_is_no_group_is_refused() -> None:
    ran = CliRunner().invoke(app, ["bench", "kernel", "--shapes", "decode,large"])
    assert ran.exit_code == 2
    assert "'large' is none of decode, long" in ran.output


def test_names_are_unique() -> None:
    """A row of the long form belongs to one shape."""
    shapes = [shape for group in GROUPS.values() for shape in group]
    assert len({shape.name for shape in shapes}) == len(shapes)
