"""Traces: spans of a request in every process that it passes, for an OpenTelemetry collector. Off unless asked for.

A process names its span to the next one as W3C's `traceparent`, which messages carry. The name says whether the trace
is sampled; of what is not, workers hear nothing. Spans are sent in the background, or dropped if a collector is slow.
"""

import os
import threading
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from pannier.runtime.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry import trace

PATH = "/v1/traces"
"""Of a collector that is named by its address only, as in OTEL_EXPORTER_OTLP_ENDPOINT."""
FLUSH_S = 2.0
"""How long a process that ends waits for a collector."""
Attributes = Mapping[str, str | int | float | bool]


def open_tracer(role: str, name: str, endpoint: str | None, environ: Mapping[str, str] = os.environ) -> "Tracer | None":
    """What makes the spans of this process; None unless `endpoint` or OpenTelemetry's own variables ask for it.

    Raises `ConfigError` if they do and its packages are not there, or can't speak what is asked for.
    """
    if endpoint is None and not _is_asked_for(environ):
        return None
    protocol = environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    if protocol not in (None, "", "http/protobuf"):
        raise ConfigError(f"traces are sent as http/protobuf; OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}")
    try:
        return Tracer(role, name, endpoint)
    except ImportError as error:
        raise ConfigError(f"traces need OpenTelemetry, pip install 'pannier[tracing]': {error}") from error


def _is_asked_for(environ: Mapping[str, str]) -> bool:
    refused = environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or environ.get("OTEL_TRACES_EXPORTER") == "none"
    named = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    return not refused and any(environ.get(name) for name in named)


class Tracer:
    """Makes the spans of one process. Raises `ImportError` where OpenTelemetry is not installed."""

    def __init__(self, role: str, name: str, endpoint: str | None) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        url = endpoint if endpoint is None or endpoint.endswith(PATH) else endpoint.rstrip("/") + PATH
        service = os.environ.get("OTEL_SERVICE_NAME") or f"pannier-{role}"
        resource = Resource.create({"service.name": service, "service.instance.id": name})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._exporter = OTLPSpanExporter(endpoint=url)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("pannier")
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, name: str, parent: str | None, kind: Literal["server", "internal"] = "internal") -> "Span":
        """A span from now on, of the trace that `parent` names or of a new one."""
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind

        context = Context() if parent is None else self._propagator.extract({"traceparent": parent}, Context())
        return Span(self._tracer.start_span(name, context, SpanKind[kind.upper()]))

    def close(self) -> None:
        """Send what there is, if a collector takes it soon."""
        sending = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        sending.start()
        sending.join(FLUSH_S)
        if sending.is_alive():
            self._exporter.shutdown()  # type: ignore[no-untyped-call]  # it tries again and again
            sending.join(FLUSH_S)


class Span:
    """Something that a process does, from when it is made to its end."""

    def __init__(self, span: "trace.Span") -> None:
        self._span = span
        context = span.get_span_context()
        self.traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
        """Its name for whoever goes on."""
        self.is_sampled = context.trace_flags.sampled
        """Whether anybody will see it."""

    def event(self, name: str) -> None:
        """Something has happened in it."""
        self._span.add_event(name)

    def end(self, attributes: Attributes, error: str | None = None) -> None:
        """It ends now."""
        self._span.set_attributes(dict(attributes))
        if error is not None:
            from opentelemetry.trace import Status, StatusCode

            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end()


class StepSpans:
    """A step's spans, one in the trace of each of its requests that is traced; without a tracer names are passed on."""

    def __init__(self, tracer: Tracer | None, name: str, traces: Iterable[str], step: int, lane: int) -> None:
        self._about = {"pannier.step": step, "pannier.lane": lane}
        self._spans = () if tracer is None else tuple(tracer.begin(name, parent) for parent in traces)
        self.traces = tuple(traces) if tracer is None else tuple(span.traceparent for span in self._spans)
        """What the step is called further on."""

    def end(self, attributes: Mapping[str, Any], error: str | None = None) -> None:
        """The step has ended."""
        for span in self._spans:
            span.end({**self._about, **attributes}, error)
