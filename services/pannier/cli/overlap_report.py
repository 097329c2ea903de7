"""What `pannier bench overlap` says: the parts of a lane-step, the bound they set, and the verdict."""

from collections.abc import Mapping
from statistics import median

from pannier.cli.overlap_run import Run, Window
from pannier.cli.overlap_verdict import verdict
from pannier.cli.report import Report
from pannier.planner.overlap import Parts, lane_step_bound

MS = 1e3
SINGLE, MONOLITHIC = "1 lane", "monolithic"


def overlap_report(case: str, found: Mapping[str, list[Run]], emulated: Mapping[str, object]) -> Report:
    """All engines' figures. The transfer in a bound is that of one lane, if it was timed, where it waits for nobody."""
    settings: dict[str, dict[str, object]] = {}
    if emulated:
        settings["emulated, so no figure is this machine's"] = dict(emulated)
    report = Report("bench overlap", settings=settings)
    alone = _windows(found.get(SINGLE, []))
    for name, runs in found.items():
        report.add(case, name, "run_tokens_per_s", "tokens/s", [each.tokens / each.total_s for each in runs])
        if name != MONOLITHIC and (windows := _windows(runs)):
            _add_windows(report, case, name, windows, alone or windows)
    if MONOLITHIC in found:
        settings["verdict"] = {"offloading": _verdict(found, alone)}
    return report


def _windows(runs: list[Run]) -> list[Window]:
    return [each.window for each in runs if each.window is not None]


def _num_lanes(name: str) -> int:
    return int(name.split()[0])


def _parts(window: Window, alone: list[Window]) -> Parts:
    """Those of a window, with the transfer that nothing else held up."""
    return window.parts._replace(transfer_s=median(each.parts.transfer_s for each in alone))


def _add_windows(report: Report, case: str, name: str, windows: list[Window], alone: list[Window]) -> None:
    def add(metric: str, unit: str, values: list[float]) -> None:
        report.add(case, name, metric, unit, values)

    bounds = [lane_step_bound(_parts(w, alone), _num_lanes(name), len(w.compute_s)).seconds for w in windows]
    add("tokens_per_s", "tokens/s", [w.tokens / w.wall_s for w in windows])
    add("time_between_tokens", "ms", [MS * w.wall_s * w.requests / w.tokens for w in windows])
    add("rows_per_lane_step", "rows", [w.tokens / w.steps for w in windows])
    add("lane_step", "ms", [MS * w.lane_step_s for w in windows])
    add("bound", "ms", [MS * bound for bound in bounds])
    add("lane_step_of_bound", "x", [w.lane_step_s / bound for w, bound in zip(windows, bounds, strict=True)])
    for part in ("compute", "attention", "transfer", "exposed_attention", "exposed_transfer"):
        add(part, "ms", [MS * w.of_step(f"{part}_s") for w in windows])
    add("compute_busy", "share", [w.compute_busy for w in windows])
    add("attention_busy", "share", [w.attention_busy for w in windows])


def _verdict(found: Mapping[str, list[Run]], alone: list[Window]) -> str:
    """Of the engine with the most lanes."""
    name = max((name for name in found if name != MONOLITHIC), key=_num_lanes)
    windows = _windows(found[name])
    if not windows:
        return "can't be judged: at no moment did all requests decode; give it a longer --output"
    parts = Parts(*(median(column) for column in zip(*(_parts(w, alone or windows) for w in windows), strict=True)))
    rows = median(w.tokens / w.steps for w in windows)
    speeds = [median(each.tokens / each.total_s for each in found[which]) for which in (name, MONOLITHIC)]
    return verdict(parts, _num_lanes(name), rows, *speeds)
