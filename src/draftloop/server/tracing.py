"""Spans for OpenTelemetry, one for each request, with the attributes' names as vLLM has them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from draftloop.errors import ConfigError

if TYPE_CHECKING:
    from draftloop.server.reply import Reply

SPAN = "llm_request"


class Tracer:
    """Sends spans in a thread of its own, many at a time."""

    def __init__(self, exporter: Any, model_name: str | None = None) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = TracerProvider(resource=Resource.create({"service.name": "draftloop"}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("draftloop")
        self._propagator = TraceContextTextMapPropagator()
        self._model_name = model_name

    def record(self, reply: Reply, headers: Mapping[str, str]) -> None:
        """A request that has ended, as part of the trace that its `traceparent` header names."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        facts, params, now = reply.facts(), reply.params, time.time_ns()
        start = now - int(facts["seconds"] * 1e9)
        context = self._propagator.extract(dict(headers))
        span = self._tracer.start_span(SPAN, kind=SpanKind.SERVER, context=context, start_time=start)
        attributes = {
            "gen_ai.response.model": self._model_name,
            "gen_ai.request.id": reply.id,
            "gen_ai.request.n": params.n,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.usage.prompt_tokens": facts["prompt_tokens"],
            "gen_ai.usage.completion_tokens": facts["completion_tokens"],
            "gen_ai.response.finish_reasons": facts["finish_reasons"],
            "gen_ai.latency.time_in_queue": facts["queue_s"],
            "gen_ai.latency.time_to_first_token": facts["time_to_first_token"],
            "gen_ai.latency.e2e": facts["seconds"],
            "gen_ai.latency.time_in_model_prefill": facts["prefill_s"],
            "gen_ai.latency.time_in_model_decode": facts["decode_s"],
            "gen_ai.latency.time_in_model_inference": facts["prefill_s"] + facts["decode_s"],
        }
        span.set_attributes({name: value for name, value in attributes.items() if value is not None})
        if "error" in facts["finish_reasons"]:
            span.set_status(Status(StatusCode.ERROR))
        span.end(now)

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()


def make_tracer(endpoint: str, model_name: str | None = None) -> Tracer:
    """Raises ConfigError without the packages of the extra `otel`."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        return Tracer(OTLPSpanExporter(endpoint=endpoint), model_name)
    except ImportError as error:
        raise ConfigError(
            f"--otlp-traces-endpoint needs packages that are not installed ({error.name}): "
            "pip install 'draftloop[otel]'"
        ) from error
