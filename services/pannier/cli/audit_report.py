"""What an audit of element types says: for people, and in long form for programs."""

import sys
from typing import TYPE_CHECKING

from pannier.audit.calls import name_of
from pannier.audit.verdict import Verdict
from pannier.cli.report import Report

if TYPE_CHECKING:
    from rich.table import Table

    from pannier.audit import Audit, Finding, Fix
    from pannier.audit.findings import Amount


WIDE = 200
"""Columns of a table that goes into a file."""


def print_audit(found: "Audit") -> None:
    """The header, what to do, and every finding."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else WIDE
    console = Console(highlight=False, markup=False, soft_wrap=True, width=width)
    for name, value in _header(found).items():
        console.print(f"{name}: {value}")
    console.print(_budget(found))
    for fix in found.fixes:
        console.print(_fix(fix))
    if not found.fixes:
        console.print("nothing to fix")
    console.print()
    console.print(_table(found.findings))
    for check in found.checks:
        console.print(check)


def _header(found: "Audit") -> dict[str, str]:
    device, types = found.device, found.dtypes
    code = f", capability {device.capability}" if device.capability else ""
    code += f", runs {device.cubin} of {' '.join(device.archs)}" if device.archs else ""
    work = found.recording.work
    return {
        "model": f"{found.model}, {work.batch} x {work.prompt} tokens, then one at a time"
        + (f", autocast {name_of(work.autocast)}" if work.autocast is not None else ""),
        "device": f"{device.name}{code}; multiplies {', '.join(device.native)}; {device.bandwidth / 1e9:.0f} GB/s",
        "types": f"storage {types.storage or '-'}, parameters {types.parameters}, compute {types.compute}, "
        f"KV {types.kv}, wire {types.wire}, logits {types.logits}",
        "attention": found.attention,
        "fallbacks": "; ".join(found.fallbacks) or "none",
    }


def _budget(found: "Audit") -> str:
    budget = found.budget
    ms = [1e3 * each for each in (budget.step_s, budget.streaming_s, budget.conversion_s, budget.unexplained_s)]
    kernels = found.recording.profile.kernel_s
    shares = ", ".join(f"{what} {1e3 * seconds:.2f} ms" for what, seconds in sorted(kernels.items()))
    return (
        f"{budget.phase}: {ms[0]:.3g} ms a step; {_bytes(budget.streamed)} to read once are {ms[1]:.3g} ms, "
        f"conversions {ms[2]:.3g} ms, neither {ms[3]:.3g} ms" + (f"; kernels: {shares}" if shares else "")
    )


def _fix(fix: "Fix") -> str:
    gains = ", ".join(f"{amount.gain:.0%} of {phase}" for phase, amount in fix.amounts.items())
    shares = ", ".join(f"{amount.share:.0%} of {phase}" for phase, amount in fix.amounts.items())
    places = f"{len(fix.sites)} places" if len(fix.sites) > 1 else fix.sites[0].path
    return f"fix: {fix.remedy} ({places}: takes {shares}; gains at most {gains})"


def _table(findings: "tuple[Finding, ...]") -> "Table":
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("verdict", "size", "where", "from", "to", "how"):
        table.add_column(column, overflow="fold")
    for column in ("a step", "bytes/token", "of the time", "gains at most"):
        table.add_column(column, justify="right")
    table.add_column("why", overflow="fold")
    for finding in findings:
        phase, amount = _main(finding)
        site, judgement = finding.site, finding.judgement
        table.add_row(
            str(judgement.verdict), str(site.size), site.path, name_of(site.source), name_of(site.target),
            str(site.how), f"{amount.count}", _bytes(amount.nbytes / amount.tokens), f"{amount.share:.1%}",
            f"{amount.gain:.1%} of {phase}", judgement.reason if judgement.verdict is not Verdict.FIX else "",
        )  # fmt: skip
    return table


def _main(finding: "Finding") -> "tuple[str, Amount]":
    """The phase in which it takes the most."""
    return max(finding.amounts.items(), key=lambda item: item[1].gain)


def _bytes(number: float) -> str:
    return next((f"{number / size:.3g} {unit}" for size, unit in UNITS if number >= size), f"{number:.0f} B")


UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def report_of(found: "Audit") -> Report:
    """The same as rows."""
    engine = "predicted" if "predicted" in found.device.name else "transformers"
    report = Report("audit dtype", settings={"header": {**_header(found), "checks": list(found.checks)}})
    work, recording = found.recording.work, found.recording
    whole = f"{found.model} {work.batch}x{work.prompt}"
    for phase, seconds in recording.seconds.items():
        report.add(f"{whole} {phase}", engine, "step_s", "s", seconds)
    budget = found.budget
    tokens_per_s = recording.tokens(budget.phase) / budget.step_s
    _add(report, f"{whole} {budget.phase}", engine, {
        "decode_tokens_per_s" if budget.phase == "decode" else "tokens_per_s": (tokens_per_s, "tokens/s"),
        "streamed_bytes": (budget.streamed, "B"),
        "streaming_s": (budget.streaming_s, "s"),
        "conversion_s": (budget.conversion_s, "s"),
        "conversion_share": (min(1.0, budget.conversion_s / budget.step_s), "of the time"),
        "unexplained_s": (budget.unexplained_s, "s"),
    })  # fmt: skip
    for fix in found.fixes:
        for phase, amount in fix.amounts.items():
            _add(report, f"{whole} {phase}: fix: {fix.remedy}", engine, _figures(amount))
    for finding in found.findings:
        for phase, amount in finding.amounts.items():
            _add(report, f"{whole} {phase}: {finding.site}", engine, _figures(amount))
    report.settings["verdicts"] = {
        str(each.site): f"{each.judgement.verdict}: {each.judgement.reason}" for each in found.findings
    }
    return report


def _figures(amount: "Amount") -> dict[str, tuple[float, str]]:
    return {
        "count_per_step": (amount.count, "conversions"),
        "bytes_per_token": (amount.nbytes / amount.tokens, "B"),
        "seconds_per_step": (amount.seconds, "s"),
        "time_share": (amount.share, "of the time"),
        "gain_bound": (amount.gain, "of the time"),
    }


def _add(report: Report, case: str, engine: str, figures: dict[str, tuple[float, str]]) -> None:
    for metric, (value, unit) in figures.items():
        report.add(case, engine, metric, unit, [float(value)])
