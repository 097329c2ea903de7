"""What `pannier bench kernel` shows: a line for each shape, and the roofline."""

import sys

from pannier.cli.charts import Series, line_chart
from pannier.cli.kernel_shapes import GEMM, STREAM, Shape
from pannier.cli.report import FILE_WIDTH, Report

OURS = "pannier"
CONTIGUOUS, PAGED = "torch, contiguous", "torch, paged"
MACHINE = "this machine"
UNITS = {STREAM: ("gb_per_s", "GB/s"), GEMM: ("gflop_per_s", "GFLOP/s")}
"""Metric and unit of what is measured against each ceiling, and of the ceiling."""
SHARES = {STREAM: "share_of_read_stream", GEMM: "share_of_bf16_gemm"}


def print_summary(report: Report, shapes: list[Shape]) -> None:
    """The medians; all repeats are in the long form."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("shape", "", "", "share of", "", "of torch, contiguous", "of torch, paged"):
        table.add_column(column, overflow="fold")
    values = {(row.case, row.engine, row.metric): row.value for row in report.rows}
    for shape in shapes:
        metric, unit = UNITS[shape.ceiling]
        if (shape.name, OURS, metric) not in values:
            continue
        rate = values[shape.name, OURS, metric]
        share = values[shape.name, OURS, SHARES[shape.ceiling]]
        times = []
        for kind in (CONTIGUOUS, PAGED):
            theirs = values.get((shape.name, kind, metric))
            form = report.settings[kind].get(shape.name)
            times.append("" if theirs is None else f"{rate / theirs:.1f}x ({form})")
        table.add_row(shape.name, f"{rate:.4g}", unit, f"{share:.0%}", shape.ceiling, *times)
    width = None if sys.stdout.isatty() else FILE_WIDTH
    console = Console(highlight=False, markup=False, soft_wrap=True, width=width)
    console.print(table)
    console.print(", ".join(f"{name} {value}" for name, value in report.settings[MACHINE].items()))
    for row in report.rows:
        if row.case == MACHINE:
            console.print(f"{row.engine}: {row.value:.4g} {row.unit}, {min(row.repeats):.4g} to {max(row.repeats):.4g}")


def roofline(report: Report, shapes: list[Shape]) -> str:
    """GFLOP/s over operations per byte: what memory and processor allow, and where each shape lies below it."""
    values = {(row.case, row.engine): row.value for row in report.rows if row.unit}
    bandwidth, peak = values[MACHINE, STREAM], values[MACHINE, GEMM]
    attended = [shape for shape in shapes if shape.flops and (shape.name, OURS) in values]
    edges = [min((shape.intensity for shape in attended), default=1.0) / 2, peak / bandwidth]
    edges.append(max(edges[1], *(shape.intensity for shape in attended)) * 2)
    series = [Series("roof", [(x, min(x * bandwidth, peak)) for x in edges])]
    for engine in (OURS, CONTIGUOUS, PAGED):
        shown = [shape for shape in attended if (shape.name, engine) in values]
        per_unit = [1.0 if shape.ceiling == GEMM else shape.intensity for shape in shown]
        heights = [values[shape.name, engine] * factor for shape, factor in zip(shown, per_unit, strict=True)]
        points = [(shape.intensity, height) for shape, height in zip(shown, heights, strict=True)]
        labels = [f"{engine}: {shape.name}, {y:.4g} GFLOP/s" for shape, (_, y) in zip(shown, points, strict=True)]
        series.append(Series(engine, points, labels, is_line=False))
    title = f"Attention on this CPU: {bandwidth:.3g} GB/s, {peak:.3g} GFLOP/s in bf16"
    return line_chart(title, "operations per byte", "GFLOP/s", series, log_x=True, log_y=True)
