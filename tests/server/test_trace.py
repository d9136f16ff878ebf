"""Traces: which stages an answer came to, and the spans of requests in OpenTelemetry's words."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from disagg.config import ServerConfig
from disagg.errors import ConfigError, DeadlineError
from disagg.server import trace
from disagg.server.app import create_app
from disagg.server.metrics import AnswerTimes
from disagg.server.spans import OpenTelemetrySpans, answer_attributes
from disagg.server.trace import AnswerTrace, carrier_of, is_wanted, open_spans
from tests.server.conftest import completions_of
from tests.server.visits import get, send

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
BODY = {"prompt": "abc", "max_tokens": 3}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
KV = {
    "encode_ms": 200.0,
    "wire_ms": 900.0,
    "verify_ms": 100.0,
    "admit_ms": 50.0,
    "exposed_ms": 500.0,
}


def answer(num_tokens: int = 9, **kv: float) -> AnswerTrace:
    """One that arrived at second 10, began at 11, had its first token at 13, its last at 20."""
    times = AnswerTimes(10.0)
    if num_tokens:
        times.first_token, times.last_token, times.num_tokens = 13.0, 20.0, num_tokens
    return AnswerTrace(0, times, waited_s=1.0, kv=kv, finish_reason="stop")


def test_the_stages_of_an_answer_that_was_handed_off():
    stages = {x.name: (x.begin, round(x.end, 9)) for x in answer(**KV).stages()}

    assert stages == {
        "queue": (10.0, 11.0),
        "prefill": (11.0, 13.0),
        "encode": (12.8, 13.0),
        "wire": (12.6, 13.5),
        "verify": (13.35, 13.45),
        "admit": (13.45, 13.5),
        "decode": (13.5, 20.0),
    }


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [(0, ["queue"]), (1, ["queue", "prefill", "decode"])],
    ids=["refused", "local"],
)
def test_an_answer_has_only_the_stages_that_it_came_to(num_tokens, expected):
    stages = answer(num_tokens).stages()

    assert [stage.name for stage in stages] == expected
    assert all(stage.begin <= stage.end for stage in stages)


@pytest.fixture
def exported() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def visit(exported, router) -> Callable[..., list[ReadableSpan]]:
    """Sends a request to a traced service; returns the spans, that of the request last."""
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exported))
    completions = completions_of(router)
    completions.spans = OpenTelemetrySpans(provider)
    app = create_app(completions)

    def visit(path: str, body: dict[str, Any], **headers: str) -> list[ReadableSpan]:
        send(app, "POST", path, json=body, headers=headers)
        return list(exported.get_finished_spans())

    return visit


def test_a_request_is_one_span_with_a_child_for_each_stage(visit):
    *stages, request = visit("/v1/completions", BODY)

    names = [span.name for span in stages]
    assert names == ["queue", "prefill", "encode", "wire", "verify", "admit", "decode"]
    assert request.name == "text_completion tiny"
    assert request.kind.name == "SERVER"
    assert {span.parent.span_id for span in stages} == {request.context.span_id}
    assert all(span.start_time <= span.end_time for span in (*stages, request))


def test_a_span_has_the_attributes_of_the_genai_conventions(visit):
    *_, request = visit("/v1/chat/completions", CHAT, **{"X-Request-Id": "order-7"})

    attributes = dict(request.attributes)
    times = {name: attributes.pop(name) for name in list(attributes) if "time" in name}
    assert attributes.pop("gen_ai.latency.e2e") > 0
    assert times["gen_ai.latency.time_to_first_token"] > 0
    assert set(times) == {
        "gen_ai.latency.time_in_queue",
        "gen_ai.latency.time_to_first_token",
        "gen_ai.latency.time_in_model_prefill",
        "gen_ai.latency.time_in_model_decode",
    }
    assert attributes == {
        "http.request.method": "POST",
        "url.path": "/v1/chat/completions",
        "http.response.status_code": 200,
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "disagg",
        "gen_ai.request.id": "order-7",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.request.choice.count": 1,
        "gen_ai.request.max_tokens": 3,
        "gen_ai.request.temperature": 1.0,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.usage.input_tokens": 4,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.response.finish_reasons": ("length",),
    }


@pytest.mark.parametrize("stream", [False, True])
def test_spans_continue_the_trace_of_the_client(stream, visit):
    headers = {"traceparent": TRACEPARENT, "tracestate": "a=1,b=2"}

    spans = visit("/v1/completions", {**BODY, "stream": stream}, **headers)

    *_, request = spans
    assert {f"{span.context.trace_id:032x}" for span in spans} == {TRACE}
    assert f"{request.parent.span_id:016x}" == PARENT
    assert request.context.trace_state.to_header() == "a=1,b=2"


def test_a_trace_that_the_client_does_not_sample_has_no_spans(visit):
    assert visit("/v1/completions", BODY, traceparent=TRACEPARENT[:-2] + "00") == []


@pytest.mark.parametrize("traceparent", ["", "00-x-y-01", "a" * 5000])
def test_a_broken_traceparent_begins_a_new_trace(traceparent, visit):
    *_, request = visit("/v1/completions", BODY, traceparent=traceparent)

    assert request.parent is None


def test_every_choice_has_its_stages(visit):
    *stages, request = visit("/v1/completions", {**BODY, "n": 2})

    choices = {span.attributes["disagg.choice"] for span in stages}
    assert choices == {0, 1}
    assert request.attributes["gen_ai.usage.output_tokens"] == 6


def test_answers_are_in_the_order_of_choices_whichever_ends_first():
    last_choice = replace(answer(cached_tokens=2), choice=1, finish_reason="length")

    attributes = answer_attributes([last_choice, answer(cached_tokens=2)], n=2)

    assert attributes["gen_ai.response.finish_reasons"] == ["stop", "length"]


def test_cached_tokens_of_a_prompt_count_once(visit, router):
    router.kv = {"cached_tokens": 2}

    *_, request = visit("/v1/completions", {**BODY, "prompt": ["abc", "abd"], "n": 2})

    assert request.attributes["gen_ai.usage.cache_read.input_tokens"] == 4


def test_a_request_that_fails_has_a_span_with_its_status(visit, router):
    router.refuses = DeadlineError("no token in 300 s")

    *_, request = visit("/v1/completions", BODY)

    assert request.attributes["http.response.status_code"] == 504
    assert request.attributes["error.type"] == "504"
    assert request.attributes["gen_ai.response.finish_reasons"] == ("error",)


def test_a_request_that_is_refused_has_a_span_too(visit):
    (request,) = visit("/v1/completions", {"prompt": 7.5})

    assert request.attributes["http.response.status_code"] == 400


@pytest.mark.parametrize("path", ["/tokenize", "/v1/embeddings"])
def test_requests_for_no_answer_are_not_traced(path, visit):
    assert visit(path, {"prompt": "abc"}) == []


def test_several_tracestate_headers_are_one_list():
    headers = [(b"tracestate", b"a=1"), (b"host", b"here"), (b"tracestate", b"b=2")]

    assert carrier_of(headers) == {"tracestate": "a=1,b=2"}


SWITCHES = [
    ({}, None, False),
    ({}, "http://collector:4318", True),
    ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}, None, True),
    ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://collector:4318"}, None, True),
    ({"OTEL_TRACES_EXPORTER": "otlp"}, None, True),
    (
        {"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c"},
        None,
        False,
    ),
    ({"OTEL_SDK_DISABLED": "true"}, "http://collector:4318", False),
]


@pytest.fixture
def environment(monkeypatch) -> pytest.MonkeyPatch:
    """Without variables of OpenTelemetry."""
    for name in list(trace.os.environ):
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.parametrize(("variables", "endpoint", "wanted"), SWITCHES)
def test_traces_are_on_by_setting_or_variable(variables, endpoint, wanted, environment):
    for name, value in variables.items():
        environment.setenv(name, value)

    assert is_wanted(ServerConfig(traces_endpoint=endpoint)) is wanted


def test_without_the_packages_the_setting_is_an_error_that_says_how(environment):
    environment.setitem(sys.modules, "disagg.server.spans", None)

    with pytest.raises(ConfigError, match=r"pip install 'disagg\[otel\]'"):
        open_spans(ServerConfig(traces_endpoint="http://collector:4318"))


ENDPOINTS = [
    ("http://collector:4318", "http", "http://collector:4318/v1/traces"),
    ("http://collector:4318/own", "http", "http://collector:4318/own"),
    ("grpc://collector:4317", "grpc", "collector:4317"),
]


@pytest.mark.parametrize(("endpoint", "protocol", "target"), ENDPOINTS)
def test_an_endpoint_says_its_protocol(endpoint, protocol, target):
    from disagg.server.spans import exporter_to

    exporter = exporter_to(endpoint)

    assert f".{protocol}." in type(exporter).__module__
    assert exporter._endpoint == target


UNTRACED = """
import sys
from disagg.config import ServerConfig
from disagg.server.app import create_app
from disagg.server.trace import open_spans
assert open_spans(ServerConfig()) is None
print([x for x in sys.modules if x.startswith(("opentelemetry.sdk", "opentelemetry.exporter"))])
"""


def test_without_the_setting_nothing_of_opentelemetry_is_imported():
    """But for its interface, which FastAPI may need."""
    command = [sys.executable, "-c", UNTRACED]

    process = subprocess.run(command, capture_output=True, text=True, env={"HOME": "/"})

    assert process.stdout == "[]\n", process.stderr


def test_a_router_gets_the_ids_of_requests(app, router):
    send(app, "POST", "/v1/completions", json=BODY, headers={"X-Request-Id": "order-7"})

    assert router.request_ids == ["order-7"]


def test_a_status_lists_running_requests(app):
    assert get(app, "/status").json()["running"] == []
