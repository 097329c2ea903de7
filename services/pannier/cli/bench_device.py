"""`pannier bench device`: what this machine achieves, as a profile that plans use in place of advertised rates."""

import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pannier.cli.report import Report, cpu_name

if TYPE_CHECKING:
    import torch

    from pannier.cli.device_probe import Probe
    from pannier.planner.profile import AttentionTime, EngineCost, GemmRate, LinkRate, Profile, SliceTime

SLICE_ROWS = [1, 2, 4, 8, 16, 32, 64]
GRID = [(rows, context) for rows in (1, 4, 16, 64) for context in (128, 1024, 4096)]
MOST_TOKENS = 64 * 1024
"""Of one call in a grid, so that no cache of it is large."""
LINK_SIZES = (4 << 10, 32 << 10, 256 << 10, 1 << 20)
LONG_CONTEXT, LONG_ROWS = 4096, 4
COMMON_CALL = (32, 8, 128)
"""Query heads, KV heads and size of the call whose share of the read stream stands for all."""


def device(
    device: Annotated[str, typer.Option(help="cpu, or cuda:0 and so on.")] = "cpu",
    model: Annotated[
        list[str] | None, typer.Option(help="Also what this model's slices and attention take; may be repeated.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of models: bfloat16, float32 or float16.")] = "bfloat16",
    seconds: Annotated[float, typer.Option(min=0.01, help="How long each thing is measured.")] = 0.3,
    save: Annotated[Path | None, typer.Option(help="Write the profile, for pannier plan --profile.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")] = False,
) -> None:
    """Measure products of matrices, reads, attention, conversions and links; with --model also its own parts.

    A profile is measured once, before anything is predicted with it. Nothing else should run meanwhile.
    """
    from pannier.planner.profile import write_profile

    profile = measure(device, model or [], dtype, seconds)
    report = _report(profile)
    report.print()
    if save is not None:
        write_profile(save, profile)
    if as_json:
        print(report.to_json())


def measure(name: str, models: list[str], dtype: str, seconds: float) -> "Profile":
    """The whole profile. Models are measured on a CPU only, with all cores and with half of them."""
    import torch

    from pannier.cli.device_probe import Probe
    from pannier.planner.profile import Profile
    from pannier.planner.sizes import CallSize
    from pannier.runtime.host import host_cores
    from pannier.runtime.machine import memory, native_dtypes, open_device

    opened, cores = open_device(name), host_cores()
    probe, counts = Probe(opened, seconds), sorted({max(1, cores // 2), cores})
    reads, gemms = {}, list["GemmRate"]()
    for threads in counts if opened.type == "cpu" else counts[-1:]:
        torch.set_num_threads(threads)
        reads[threads] = probe.read()
        for each in native_dtypes(opened):
            if each.name.startswith(("FLOAT32", "BFLOAT16", "FLOAT16")):
                gemms += probe.gemms(each.name.lower(), threads)
        _say(f"{threads} threads: {reads[threads] / 1e9:.1f} GB/s")
    call = CallSize(COMMON_CALL[0], COMMON_CALL[1], COMMON_CALL[2], COMMON_CALL[2])
    attention_s = probe.attention(call, dtype, LONG_ROWS, LONG_CONTEXT)
    stored = LONG_ROWS * LONG_CONTEXT * call.kv_heads * 2 * call.k_size * getattr(torch, dtype).itemsize
    links = _links() if opened.type == "cpu" else []
    slices, attention, shared = _models(probe, models, dtype, counts, cores) if opened.type == "cpu" else ([], [], None)
    engine = _engine(probe, dtype, links, cores) if models and opened.type == "cpu" else []
    return Profile(
        accelerator=_accelerator(opened),
        source=f"pannier bench device, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {cores} cores",
        threads=counts[-1],
        memory_bytes=memory(opened).total,
        read_bytes_per_s=reads[counts[-1]],
        read_by_threads=reads,
        shared_read_bytes_per_s=shared,
        attention_bytes_per_s=stored / attention_s,
        cast_bytes_per_s=probe.casts(),
        gemms=gemms,
        links=links,
        slices=slices,
        attention=attention,
        engine=engine,
    )


def _accelerator(device: "torch.device") -> str:
    """A GPU by the catalogue's name for it, if it has one; a CPU by its own."""
    if device.type == "cpu":
        return cpu_name()
    import torch

    from pannier.planner.catalogue import load_catalogue

    own = torch.cuda.get_device_name(device)
    return next((name for name in load_catalogue().accelerators if name in own.split()), own)


def _links() -> "list[LinkRate]":
    from statistics import median

    from pannier.cli.bench_link import every_link
    from pannier.cli.link_cases import Case
    from pannier.planner.profile import LinkRate

    cases, found = [Case.equal(size) for size in LINK_SIZES], []
    with tempfile.TemporaryDirectory(prefix="pannier-bench-") as folder, every_link(Path(folder), cases) as ends:
        for kind, end in ends.items():
            for case in cases:
                end.round_trips(case, 20)
                found.append(
                    LinkRate(kind=kind, size=case.size, round_trip_s=median(end.round_trips(case, 100)))
                )  # fmt: skip
    _say("links")
    return found


def _models(
    probe: "Probe", models: list[str], dtype: str, counts: list[int], cores: int
) -> "tuple[list[SliceTime], list[AttentionTime], float]":
    """By themselves on each number of threads; and on half of the cores while another process reads."""
    import torch

    from pannier.cli.device_probe import a_reader_beside
    from pannier.cli.engine_probe import slice_times, sliced
    from pannier.cli.plan_inputs import model_sizes

    slices: list[SliceTime] = []
    attention: list[AttentionTime] = []
    for name in models:
        sizes, cut = model_sizes(name), sliced(name, dtype)
        grid = [(rows, context) for rows, context in GRID if rows * context <= MOST_TOKENS]

        def both(threads: int, *, is_shared: bool) -> None:
            torch.set_num_threads(threads)
            slices.extend(slice_times(probe, cut, sizes.name, dtype, threads, SLICE_ROWS, is_shared=is_shared))  # noqa: B023
            attention.extend(
                probe.attention_times(sizes.name, sizes.calls[0], dtype, threads, grid, is_shared=is_shared)  # noqa: B023
            )
            _say(f"{sizes.name}, {threads} threads{' beside a reader' * is_shared}")  # noqa: B023

        for threads in counts:
            both(threads, is_shared=False)
        with a_reader_beside():
            both(max(1, cores // 2), is_shared=True)
    torch.set_num_threads(1)
    with a_reader_beside():
        return slices, attention, probe.read()


def _engine(probe: "Probe", dtype: str, links: "list[LinkRate]", cores: int) -> "list[EngineCost]":
    from pannier.cli.engine_probe import engine_costs

    found = list(engine_costs(probe, dtype, links, cores))
    _say("the engine's own costs")
    return found


def _report(profile: "Profile") -> Report:
    report = Report("bench device", settings={"profile": {"of": profile.accelerator, "by": profile.source}})
    case = profile.accelerator
    for threads, rate in profile.read_by_threads.items():
        report.add(case, f"{threads} threads", "read_stream", "GB/s", [rate / 1e9])
    report.add(case, "device", "attention_stream", "GB/s", [profile.attention_bytes_per_s / 1e9])
    share = profile.attention_bytes_per_s / profile.read_bytes_per_s
    report.add(case, "device", "attention_share", "of the read stream", [share])
    for each in profile.gemms:
        engine = f"{each.threads} threads, {each.dtype}"
        report.add(case, engine, f"gemm_{each.rows}_rows", "GFLOP/s", [each.flops / 1e9])
        report.add(case, engine, f"gemm_{each.rows}_rows_weights", "GB/s", [each.bytes_per_s / 1e9])
    for name, rate in profile.cast_bytes_per_s.items():
        report.add(case, "device", f"cast_{name}", "GB/s", [rate / 1e9])
    for link in profile.links:
        report.add(case, link.kind, f"round_trip_{link.size >> 10}K", "us", [link.round_trip_s * 1e6])
    for slices in profile.slices:
        engine = f"{slices.threads} threads{' beside a reader' * slices.is_shared}"
        report.add(slices.model, engine, f"slices_{slices.rows}_rows", "ms", [slices.seconds * 1e3])
    for call in profile.attention:
        engine = f"{call.threads} threads{' beside a reader' * call.is_shared}"
        report.add(call.model, engine, f"attention_{call.rows}x{call.context}", "us", [call.seconds * 1e6])
    for cost in profile.engine:
        engine = "monolithic" if cost.is_monolithic else "offloaded"
        report.add(case, engine, "engine_per_call", "us", [cost.call_s * 1e6])
        report.add(case, engine, "engine_per_step", "us", [cost.step_s * 1e6])
    return report


def _say(what: str) -> None:
    print(f"measured: {what}", file=sys.stderr)
