"""OpenTelemetry: one trace of a request through all processes, for who asks for it; nothing for who doesn't."""

import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from pannier.http import service as http_service
from pannier.runtime.config import GatewayConfig, HttpConfig
from pannier.runtime.errors import ConfigError
from pannier.runtime.tracing import StepSpans, Tracer, open_tracer
from pannier.wire import encode
from pannier.wire.messages import BeginStep, Generate, SamplingParams
from tests.e2e.models import save_random_model
from tests.e2e.stack import running_stack
from tests.http.conftest import url_in

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"


@dataclass(frozen=True)
class Seen:
    """A span that a collector got."""

    service: str
    name: str
    trace: str
    span: str
    parent: str
    seconds: tuple[float, float]
    attributes: dict[str, Any]
    is_error: bool


class Collector(ThreadingHTTPServer):
    """Takes OTLP over HTTP, on loopback."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Taking)
        self.endpoint = f"http://127.0.0.1:{self.server_address[1]}"
        self.spans: Queue[Seen] = Queue()

    def seen(self) -> list[Seen]:
        """All that has come."""
        return [self.spans.get_nowait() for _ in range(self.spans.qsize())]


class Taking(BaseHTTPRequestHandler):
    """One batch of spans."""

    server: Collector

    def do_POST(self) -> None:  # as http.server calls it
        batch = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
        for resource in batch.resource_spans:
            named = {each.key: each.value.string_value for each in resource.resource.attributes}
            for span in (span for scope in resource.scope_spans for span in scope.spans):
                self.server.spans.put(seen(named["service.name"], span))
        self.send_response(200 if self.path == "/v1/traces" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing."""


def seen(service: str, span: Any) -> Seen:
    kinds = {each.key: each.value for each in span.attributes}
    attributes = {key: getattr(value, value.WhichOneof("value")) for key, value in kinds.items()}
    seconds = span.start_time_unix_nano / 1e9, span.end_time_unix_nano / 1e9
    ids = span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex()
    return Seen(service, span.name, *ids, seconds, attributes, span.status.code == span.status.STATUS_CODE_ERROR)


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()
    thread = threading.Thread(target=collector.serve_forever)
    thread.start()
    try:
        yield collector
    finally:
        collector.shutdown()
        collector.server_close()
        thread.join()


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_one_trace_has_the_spans_of_every_role(tmp_path: Path) -> None:
    """Begun by the client's own span: HTTP front, gateway, and of each step the compute and both attention workers."""
    save_random_model("llama", tmp_path / "model")
    compute = {"dtype": "float32", "cache_dir": tmp_path / "cache"}
    with collecting() as collector:
        traced = {"otlp_endpoint": collector.endpoint}
        with running_stack(tmp_path / "run", tmp_path / "model", compute=compute, every_role=traced) as (stack, client):
            stack.start(http_service.run, "http", HttpConfig(gateway=stack.endpoint, port=0, **traced))
            url = f"{url_in(tmp_path / 'run' / 'http.log')}/v1/completions"
            body = {"prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}
            for traceparent in (SAMPLED, UNSAMPLED):
                assert httpx.post(url, json=body, headers={"traceparent": traceparent}, timeout=60).status_code == 200
            client.complete([8, 9], max_tokens=1)
        # All processes have ended, and sent what they had.
        found = collector.seen()
    by_trace = defaultdict(list)
    for span in found:
        by_trace[span.trace].append(span)
    assert len(by_trace) == 2, "the request that is not sampled has left something"
    check_trace(by_trace.pop(TRACE))
    (own,) = by_trace.values()
    assert {span.service for span in own} == {"pannier-gateway", "pannier-compute", "pannier-attention"}


def check_trace(spans: list[Seen]) -> None:
    by_service = defaultdict(list)
    for span in spans:
        by_service[span.service].append(span)
    (http,), (gateway,) = by_service["pannier-http"], by_service["pannier-gateway"]
    steps, attention = by_service["pannier-compute"], by_service["pannier-attention"]
    assert (http.name, http.parent, gateway.parent) == ("POST /v1/completions", PARENT, http.span)
    assert {span.parent for span in steps} == {gateway.span}
    assert len(steps) >= 4
    assert sorted(span.parent for span in attention) == sorted([span.span for span in steps] * 2)
    assert not any(span.is_error for span in spans)
    within = {span.span: span.seconds for span in spans}
    for span in spans:
        outer = within.get(span.parent, span.seconds)
        assert outer[0] <= span.seconds[0] <= span.seconds[1] <= outer[1] + 0.05  # a step's last word may cross its end
    said = gateway.attributes
    assert (said["gen_ai.usage.prompt_tokens"], said["gen_ai.usage.completion_tokens"]) == (3, 4)
    latencies = [said[f"gen_ai.latency.{name}"] for name in ("time_in_queue", "time_to_first_token", "e2e")]
    assert latencies == sorted(latencies)
    assert http.attributes["http.response.status_code"] == 200
    assert all(span.attributes["pannier.total_s"] > 0 for span in steps)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_TRACES_EXPORTER": "none"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_SDK_DISABLED": "true"},
    ],
)
def test_nobody_traces_unasked(environ: dict[str, str]) -> None:
    assert open_tracer("gateway", "gateway", GatewayConfig(model="x").otlp_endpoint, environ) is None


@pytest.mark.parametrize("name", ["OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"])
def test_opentelemetrys_own_variables_ask_for_it(name: str) -> None:
    tracer = open_tracer("gateway", "gateway", None, {name: "http://127.0.0.1:1"})
    assert tracer is not None
    tracer.close()


def test_a_protocol_that_is_not_spoken_is_refused() -> None:
    with pytest.raises(ConfigError, match="http/protobuf; OTEL_EXPORTER_OTLP_PROTOCOL is 'grpc'"):
        open_tracer("http", "http-0", "http://127.0.0.1:1", {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"})


def test_where_its_packages_are_missing_it_is_said_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"pip install 'pannier\[tracing\]'"):
        open_tracer("http", "http-0", "http://127.0.0.1:1")


@pytest.mark.slow
def test_a_collector_that_is_not_there_keeps_nobody_waiting() -> None:
    """Neither while spans are made nor at the end, and no thread goes on asking for it."""
    before = set(threading.enumerate())
    tracer = Tracer("gateway", "gateway", "http://127.0.0.1:1")
    for _ in range(5000):
        tracer.begin("generate", None).end({})
    tracer.close()
    assert set(threading.enumerate()) <= before


def test_a_worker_without_a_collector_passes_names_on() -> None:
    spans = StepSpans(None, "step", [SAMPLED], 1, 0)
    assert spans.traces == (SAMPLED,)
    spans.end({})


def test_what_is_not_traced_costs_a_byte_a_message() -> None:
    """An absent field's."""
    begin = BeginStep(1, 1, 1, 0, (), (), ())
    (header,) = encode(begin)
    assert len(encode(BeginStep(1, 1, 1, 0, (), (), (), None, (SAMPLED,)))[0]) > len(header) + len(SAMPLED)
    assert bytes(header).endswith(b"\xc0\x90")  # no calls, no traces
    (asked,) = encode(Generate("r", None, "x", None, None, SamplingParams()))
    assert bytes(asked).endswith(b"\xc0")
