"""What clients saw, in the fields that vLLM's own benchmark writes, and as a report of ours."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from statistics import fmean, median, pstdev
from typing import Any

from pannier.cli.report import Report
from pannier.cli.serving import Seen

PERCENTILES = (50, 90, 99)
MS = 1e3
Times = dict[str, list[float]]


def times_ms(seen: Sequence[Seen]) -> Times:
    """Milliseconds by vLLM's names: to the first token, per token behind it, between tokens, of the whole."""
    ended = [each for each in seen if each.error is None]
    return {
        "ttft": [MS * each.first_token_s for each in ended],
        "tpot": [MS * each.per_token_s for each in ended if each.tokens > 1],
        "itl": [MS * gap for each in ended for gap in each.between_s],
        "e2el": [MS * each.latency_s for each in ended],
    }


def good(seen: Sequence[Seen], limits_ms: Mapping[str, float]) -> int:
    """Requests that kept all limits (of ttft, tpot and e2el)."""
    of = {
        "ttft": lambda each: each.first_token_s,
        "tpot": lambda each: each.per_token_s,
        "e2el": lambda each: each.latency_s,
    }
    return sum(
        each.error is None and all(MS * of[name](each) <= limit for name, limit in limits_ms.items()) for each in seen
    )


def vllm_fields(
    seen: Sequence[Seen], total_s: float, limits_ms: Mapping[str, float], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """One object, as `vllm bench serve --save-result` writes it."""
    ended = [each for each in seen if each.error is None]
    tokens_in, tokens_out = sum(each.prompt_tokens for each in ended), sum(each.tokens for each in ended)
    found: dict[str, Any] = {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),  # vLLM's, of whoever measures
        **settings,
        "num_prompts": len(seen),
        "duration": total_s,
        "completed": len(ended),
        "failed": len(seen) - len(ended),
        "total_input_tokens": tokens_in,
        "total_output_tokens": tokens_out,
        "request_throughput": len(ended) / total_s,
        "request_goodput": good(seen, limits_ms) / total_s if limits_ms else None,
        "output_throughput": tokens_out / total_s,
        "total_token_throughput": (tokens_in + tokens_out) / total_s,
    }
    for name, values in times_ms(seen).items():
        found |= _figures(name, values)
    return found | {
        "input_lens": [each.prompt_tokens for each in seen],
        "output_lens": [each.tokens for each in seen],
        "ttfts": [each.first_token_s for each in seen],
        "itls": [each.between_s for each in seen],
        "start_times": [each.start_s for each in seen],
        "errors": [each.error or "" for each in seen],
    }


def _figures(name: str, values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    ordered = sorted(values)
    percentiles = {f"p{share}_{name}_ms": _percentile(ordered, share) for share in PERCENTILES}
    return {
        f"mean_{name}_ms": fmean(values),
        f"median_{name}_ms": median(values),
        f"std_{name}_ms": pstdev(values),
        **percentiles,
    }


def _percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that so many don't exceed."""
    return ordered[max(0, -(-len(ordered) * int(share) // 100) - 1)]


def report_of(case: str, engine: str, fields: Mapping[str, Any]) -> Report:
    """The figures that people read."""
    report = Report("bench serve")
    units = {
        "completed": "requests", "failed": "requests", "request_throughput": "requests/s",
        "request_goodput": "requests/s", "output_throughput": "tokens/s", "total_token_throughput": "tokens/s",
    }  # fmt: skip
    for name, unit in units.items():
        if fields[name] is not None:
            report.add(case, engine, name, unit, [float(fields[name])])
    for name, value in fields.items():
        if name.endswith("_ms"):
            report.add(case, engine, name.removesuffix("_ms"), "ms", [float(value)])
    return report
