"""What Prometheus may ask for: vLLM's names for what means the same, and ours for the rest.

Counters and histograms are of the requests that came through this process. What belongs to the whole stack is read
from the gateway's status at each scrape.
"""

import time
from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pannier.client import Delta

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
LENGTHS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
MODEL = ("model_name", "engine")
disable_created_metrics()  # type: ignore[no-untyped-call]  # one more series for each of ours, which nobody asks for


class Metrics:
    """The counters of one process, under one model's name."""

    def __init__(self, model: str) -> None:
        self._registry = CollectorRegistry()
        self._status = StackStatus(model)
        self._registry.register(self._status)
        labels = {"model_name": model, "engine": "0"}

        def counter(name: str, text: str) -> Counter:
            return Counter(f"vllm:{name}", text, MODEL, registry=self._registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
            made = Histogram(f"vllm:{name}", text, MODEL, registry=self._registry, buckets=buckets)
            return made.labels(**labels)

        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts").labels(**labels)
        self.cached_tokens = counter("prompt_tokens_cached", "Of these, found in the prefix cache").labels(**labels)
        self.prefix_queries = counter("prefix_cache_queries", "Tokens looked for in the prefix cache").labels(**labels)
        self.prefix_hits = counter("prefix_cache_hits", "Of these, found there").labels(**labels)
        self.generation_tokens = counter("generation_tokens", "Tokens generated").labels(**labels)
        self._success = Counter(
            "vllm:request_success", "Requests that ended well", (*MODEL, "finished_reason"), registry=self._registry
        )
        self._labels = labels
        self.first_token = histogram("time_to_first_token_seconds", "From the request to its first token")
        self.between_tokens = histogram("inter_token_latency_seconds", "From one token to the next")
        self.per_token = histogram("request_time_per_output_token_seconds", "Of a request, on average")
        self.whole = histogram("e2e_request_latency_seconds", "From the request to its last token")
        self.prompt_lengths = histogram("request_prompt_tokens", "Tokens of each prompt", LENGTHS)
        self.output_lengths = histogram("request_generation_tokens", "Tokens of each request's outputs", LENGTHS)
        self.under_way = Gauge("pannier_http_requests_under_way", "Being answered", registry=self._registry)
        self.refused = Counter("pannier_http_errors", "Answers that are errors", ("status",), registry=self._registry)

    def ended(self, reason: str) -> None:
        """An output has come to its end."""
        self._success.labels(**self._labels, finished_reason=reason).inc()

    def text(self, status: Mapping[str, Any] | None) -> bytes:
        """All of them, in Prometheus's form; without a status only what this process counts."""
        self._status.found = status
        return generate_latest(self._registry)


class Watch:
    """One request from when it is made until its last token is here."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._started = self._last = time.perf_counter()
        self._num_tokens = 0
        self._is_open = True
        metrics.under_way.inc()

    def see(self, delta: Delta) -> None:
        """Something new has come."""
        now, metrics = time.perf_counter(), self._metrics
        if delta.tokens:
            histogram = metrics.between_tokens if self._num_tokens else metrics.first_token
            histogram.observe(now - self._last)
            self._last = now
            self._num_tokens += len(delta.tokens)
            metrics.generation_tokens.inc(len(delta.tokens))
        if delta.finish_reason is not None:
            metrics.ended(delta.finish_reason)
        if delta.usage is not None:
            metrics.prompt_tokens.inc(delta.usage.prompt_tokens)
            metrics.cached_tokens.inc(delta.usage.cached_tokens)
            metrics.prefix_queries.inc(delta.usage.prompt_tokens)
            metrics.prefix_hits.inc(delta.usage.cached_tokens)
            metrics.prompt_lengths.observe(delta.usage.prompt_tokens)
            metrics.output_lengths.observe(delta.usage.completion_tokens)
            metrics.whole.observe(now - self._started)
            metrics.per_token.observe((now - self._started) / max(1, delta.usage.completion_tokens))

    def close(self) -> None:
        """It has ended, however; again is fine."""
        if self._is_open:
            self._is_open = False
            self._metrics.under_way.dec()


class StackStatus(Collector):
    """The gateway's status as gauges."""

    def __init__(self, model: str) -> None:
        self.found: Mapping[str, Any] | None = None
        self._model = [model, "0"]

    def collect(self) -> Iterable[Metric]:
        """Of the status that was found last."""
        if self.found is None:
            return
        yield from self._of_requests(self.found)
        yield from _of_lanes(self.found["lanes"])
        yield from _of_workers(self.found["processes"])

    def _of_requests(self, found: Mapping[str, Any]) -> Iterable[Metric]:
        blocks = found["groups"].values()
        total = sum(group["total"] for group in blocks)
        used = sum(group["used"] for group in blocks)
        yield self._gauge("vllm:num_requests_running", "Being computed", found["requests"]["running"])
        waiting = found["requests"]["waiting"] + found["requests"]["reading"]
        yield self._gauge("vllm:num_requests_waiting", "Not yet begun", waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1", used / total if total else 0)
        preemptions = CounterMetricFamily("vllm:num_preemptions", "Since the gateway's start", labels=MODEL)
        preemptions.add_metric(self._model, found["preemptions"])
        yield preemptions
        yield self._gauge("pannier_accounting_errors", "Times that blocks didn't add up", found["accounting_errors"])
        yield self._gauge("pannier_ready", "Whether requests are served", int(found["ready"]))

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=MODEL)
        family.add_metric(self._model, value)
        return family


def _of_lanes(lanes: Iterable[Mapping[str, Any]]) -> Iterable[Metric]:
    steps = GaugeMetricFamily("pannier_lane_steps", "Steps of a lane", labels=("worker", "lane"))
    seconds = GaugeMetricFamily(
        "pannier_lane_seconds",
        "Of a lane's steps, by part; exposed is what nothing hid",
        labels=("worker", "lane", "part"),
    )
    for lane in lanes:
        labels = [lane["worker"], str(lane["lane"])]
        steps.add_metric(labels, lane["steps"])
        for part, value in lane["seconds"].items():
            seconds.add_metric([*labels, part.removesuffix("_s")], value)
    return steps, seconds


def _of_workers(processes: Iterable[Mapping[str, Any]]) -> Iterable[Metric]:
    counters = GaugeMetricFamily("pannier_worker", "A worker's own counters", labels=("worker", "counter"))
    blocks = GaugeMetricFamily("pannier_kv_blocks", "Blocks of a worker's group", labels=("worker", "group", "state"))
    for process in processes:
        for name, value in process.get("counters", {}).items():
            counters.add_metric([process["name"], name], value)
        for state, value in (process.get("blocks") or {}).items():
            blocks.add_metric([process["name"], str(process["group"]), state], value)
    return counters, blocks
