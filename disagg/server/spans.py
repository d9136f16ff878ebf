"""Spans of requests for OpenTelemetry, with the attribute names of its GenAI conventions.

Imported only if traces are on; `pip install 'disagg[otel]'` brings the packages.
"""

import os
import threading
import time
from typing import Any
from urllib.parse import urlsplit

from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from disagg import __version__
from disagg.server.client import Client
from disagg.server.trace import AnswerTrace, RequestTrace

CLOSE_S = 3.0  # for the last spans, if the collector does not answer
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
# figures of a hand-off that its spans carry
FIGURES = {
    "encode": ("codec",),
    "wire": ("wire_bytes", "fp16_bytes", "cached_bytes", "attaches"),
}

Attributes = dict[str, Any]


class OpenTelemetrySpans:
    """Makes the spans of each request when it has ended: one for it, and one for each stage."""

    def __init__(self, provider: TracerProvider):
        self._provider = provider
        self._tracer = provider.get_tracer("disagg", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def write(self, client: Client) -> None:
        """The spans of a request that has ended."""
        trace = client.trace
        if trace is None:
            return
        clock = WallClock()
        span = self._tracer.start_span(
            f"{trace.operation} {trace.model}".rstrip(),
            self._propagator.extract(trace.carrier),
            SpanKind.SERVER,
            request_attributes(trace, client.request_id),
            start_time=clock.ns(trace.began),
        )
        if span.is_recording():
            self._write_stages(span, trace, clock)
        if trace.status >= 500:
            span.set_status(StatusCode.ERROR)
            span.set_attribute("error.type", str(trace.status))
        span.end(clock.ns(trace.ended))

    def _write_stages(
        self, parent: Span, trace: RequestTrace, clock: "WallClock"
    ) -> None:
        context = set_span_in_context(parent)
        for answer in trace.answers:
            for stage in answer.stages():
                span = self._tracer.start_span(
                    stage.name,
                    context,
                    attributes=stage_attributes(stage.name, answer),
                    start_time=clock.ns(stage.begin),
                )
                span.end(clock.ns(stage.end))

    def close(self) -> None:
        """Send what is left; returns within seconds."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_S)


class WallClock:
    """Converts seconds of the monotonic clock to nanoseconds of the wall clock."""

    def __init__(self) -> None:
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    def ns(self, seconds: float) -> int:
        return int(seconds * 1e9) + self._offset_ns


def request_attributes(trace: RequestTrace, request_id: str) -> Attributes:
    """Those of the span of a request."""
    attributes: Attributes = {
        "http.request.method": "POST",
        "url.path": trace.path,
        "http.response.status_code": trace.status,
        "gen_ai.operation.name": trace.operation,
        "gen_ai.provider.name": "disagg",
        "gen_ai.request.id": request_id,
        "gen_ai.latency.e2e": trace.ended - trace.began,
    }
    if trace.request is not None:
        request = trace.request
        attributes |= {
            "gen_ai.request.model": trace.model,
            "gen_ai.response.model": trace.model,
            "gen_ai.request.choice.count": request.n,
            "gen_ai.request.max_tokens": request.max_answer_tokens,
            "gen_ai.request.temperature": request.temperature,
            "gen_ai.request.top_p": request.top_p,
            "gen_ai.request.seed": request.seed,
            "gen_ai.usage.input_tokens": trace.prompt_tokens,
        }
        if trace.answers:
            attributes |= answer_attributes(trace.answers, request.n)
    return {name: value for name, value in attributes.items() if value is not None}


def answer_attributes(answers: list[AnswerTrace], n: int) -> Attributes:
    """Sums over the answers of a request, and the times of the slowest of them.

    n: answers to each prompt; its cached tokens count once, as its tokens do
    """
    answers = sorted(answers, key=lambda answer: answer.choice)
    durations = [
        {stage.name: stage.end - stage.begin for stage in answer.stages()}
        for answer in answers
    ]

    def longest(stage: str) -> float:
        return max(by_stage.get(stage, 0.0) for by_stage in durations)

    attributes: Attributes = {
        "gen_ai.usage.output_tokens": sum(each.times.num_tokens for each in answers),
        "gen_ai.usage.cache_read.input_tokens": sum(
            each.kv.get("cached_tokens", 0) for each in answers if each.choice % n == 0
        ),
        "gen_ai.response.finish_reasons": [each.finish_reason for each in answers],
        "gen_ai.latency.time_in_queue": longest("queue"),
    }
    begun = [each.times for each in answers if each.times.num_tokens]
    if begun:
        attributes |= {
            "gen_ai.latency.time_to_first_token": max(
                times.first_token - times.arrived for times in begun
            ),
            "gen_ai.latency.time_in_model_prefill": longest("prefill"),
            "gen_ai.latency.time_in_model_decode": longest("decode"),
        }
    return attributes


def stage_attributes(stage: str, answer: AnswerTrace) -> Attributes:
    """Those of the span of a stage of an answer."""
    attributes: Attributes = {"disagg.choice": answer.choice}
    for name in FIGURES.get(stage, ()):
        if name in answer.kv:
            attributes[f"disagg.{name}"] = answer.kv[name]
    return attributes


def open_writer(endpoint: str | None) -> OpenTelemetrySpans:
    """Sends spans to an endpoint; None: where the standard variables say."""
    named = Resource({"service.name": "disagg", "service.version": __version__})
    resource = named.merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter_to(endpoint)))
    return OpenTelemetrySpans(provider)


def exporter_to(endpoint: str | None) -> SpanExporter:
    """An exporter of OTLP: over gRPC for `grpc://HOST:PORT` and `grpcs://`, else over HTTP.

    None: protocol and endpoint are those of the standard variables.
    """
    scheme = urlsplit(endpoint or "").scheme
    protocols = [os.environ[name] for name in PROTOCOLS if os.environ.get(name)]
    is_grpc = scheme.startswith("grpc") if endpoint else protocols[:1] == ["grpc"]
    if is_grpc:
        from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as over_grpc

        target = urlsplit(endpoint).netloc if endpoint else None
        insecure = scheme == "grpc" if endpoint else None
        return over_grpc.OTLPSpanExporter(endpoint=target, insecure=insecure)
    from opentelemetry.exporter.otlp.proto.http import trace_exporter as over_http

    if endpoint and urlsplit(endpoint).path in ("", "/"):
        endpoint = f"{endpoint.rstrip('/')}/v1/traces"
    return over_http.OTLPSpanExporter(endpoint=endpoint)
