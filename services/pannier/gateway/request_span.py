"""What a trace says of a request in the gateway; the names of attributes are those of vLLM."""

import time

from pannier.runtime.tracing import Span, Tracer
from pannier.wire import messages as m

TRACED_STEPS = 64
"""Of one request: the steps of a long answer are all alike, and each makes a span in every worker."""


class RequestSpan:
    """One request's span, from its admission to its last token."""

    def __init__(self, span: Span, message: m.Generate) -> None:
        self._span = span
        self._message = message
        self._begun = time.perf_counter()
        self._steps = 0
        self._latencies: dict[str, float] = {}

    @classmethod
    def begin(cls, tracer: Tracer | None, message: m.Generate) -> "RequestSpan | None":
        """Of a request that is admitted; None if nobody traces it."""
        span = None if tracer is None else tracer.begin("generate", message.traceparent)
        return None if span is None or not span.is_sampled else cls(span, message)

    def step(self) -> str | None:
        """What the next of its steps is called in this trace; None once enough are traced."""
        self._steps += 1
        if self._steps == 1:
            self._note("time_in_queue")
        return self._span.traceparent if self._steps <= TRACED_STEPS else None

    def drew(self) -> None:
        """A token has come."""
        if "time_to_first_token" not in self._latencies:
            self._note("time_to_first_token")
            self._span.event("first token")

    def end(self, prompt_tokens: int, completion_tokens: int, error: str | None = None) -> None:
        """The request has ended."""
        self._note("e2e")
        params = self._message.params
        asked = {name: getattr(params, name) for name in ("n", "max_tokens", "temperature", "top_p")}
        attributes = {
            "gen_ai.request.id": self._message.request,
            **{f"gen_ai.request.{name}": value for name, value in asked.items() if value is not None},
            "gen_ai.usage.prompt_tokens": prompt_tokens,
            "gen_ai.usage.completion_tokens": completion_tokens,
            **{f"gen_ai.latency.{name}": seconds for name, seconds in self._latencies.items()},
            "pannier.steps": self._steps,
        }
        self._span.end(attributes, error)

    def _note(self, latency: str) -> None:
        self._latencies[latency] = time.perf_counter() - self._begun
