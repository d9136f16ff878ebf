"""POST /v1/responses over HTTP; its reading and its writing have tests of their own."""

import json
from typing import Any

import pytest

from disagg.errors import PeerLostError
from disagg.server.app import create_app
from tests.server.conftest import A, completions_of
from tests.server.speaking import speaking
from tests.server.visits import assert_counted, refused, respond, send


def datas(text: str) -> list[dict[str, Any]]:
    lines = text.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: ")]


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_has_the_answer_to_the_conversation(stream, app, router):
    items = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a"}]

    answer = respond(app, input=items, instructions="b", stream=stream)

    body = datas(answer.text)[-1]["response"] if stream else answer.json()
    assert body["output"][0]["content"][0]["text"] == "abcd"
    assert body["usage"]["input_tokens"] == len("sbuhiaaa")
    ((prompt, params, _),) = router.asked
    assert prompt[:4] == (
        A + 18,
        A + 1,
        A + 20,
        A + 7,
    )  # a letter of the role, the text
    assert params["max_tokens"] == 4


def test_a_stream_is_of_named_events(app):
    answer = respond(app, stream=True)

    assert answer.headers["content-type"].startswith("text/event-stream")
    names = [x[7:] for x in answer.text.splitlines() if x.startswith("event: ")]
    assert names == [data["type"] for data in datas(answer.text)]
    assert names[-1] == "response.incomplete"


def test_an_error_names_the_field_of_this_dialect(app):
    message = refused(respond(app, input="x" * 30), 400, "prompt_too_long", "input")

    assert "the prompt is too long" in message


def test_a_refused_request_is_counted(app):
    assert respond(app, previous_response_id="resp_1").status_code == 400

    assert_counted(app, {"disagg_request_failures_total{reason=request}": 1.0})


def test_an_error_before_the_first_token_is_a_status(app, router):
    router.refuses = PeerLostError("prefill-0 left")

    refused(respond(app, stream=True), 503, "peer_lost")


def test_an_error_in_mid_stream_is_an_event(app, router):
    router.pause_at, router.breaks = 1, PeerLostError("prefill-0 left")
    router.go.set()

    *_, error, failed = datas(respond(app, stream=True).text)

    assert error["error"]["message"] == "prefill-0 left"
    assert failed["type"] == "response.failed"


def test_nothing_is_stored(app):
    response_id = respond(app).json()["id"]

    for method in ("GET", "DELETE"):
        answer = send(app, method, f"/v1/responses/{response_id}")
        assert "not stored here" in refused(answer, 404, "not_found")


def test_responses_are_not_compacted(app):
    refused(send(app, "POST", "/v1/responses/compact", json={}), 404, "not_found")


def test_a_model_without_a_template_is_named(router):
    completions = completions_of(router)
    completions.reader._chat = None

    message = refused(respond(create_app(completions)), 400, "request", "input")

    assert "has no chat template" in message


LOOK = {"type": "function", "name": "look", "parameters": {"type": "object"}}
CALL = '<tool_call>{"name": "look", "arguments": {"at": 2}}</tool_call>'


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_and_calls_of_a_model_are_items(stream):
    app, _ = speaking(f"<think>Hm.</think>I look.{CALL}")

    answer = respond(app, tools=[LOOK], max_output_tokens=None, stream=stream)

    body = datas(answer.text)[-1]["response"] if stream else answer.json()
    reasoning, message, call = body["output"]
    assert reasoning["content"][0]["text"] == "Hm."
    assert message["content"][0]["text"] == "I look."
    assert (call["name"], json.loads(call["arguments"])) == ("look", {"at": 2})
    assert body["status"] == "completed"
    assert body["usage"]["output_tokens_details"]["reasoning_tokens"] >= 3


def test_a_call_of_a_function_in_a_namespace_has_both_names():
    app, _ = speaking(CALL.replace("look", "eyes__look"))
    namespace = {"type": "namespace", "name": "eyes", "tools": [LOOK]}

    (call,) = respond(app, tools=[namespace], max_output_tokens=None).json()["output"]

    assert (call["namespace"], call["name"]) == ("eyes", "look")


def test_a_call_that_is_cut_off_is_incomplete():
    app, _ = speaking(CALL)

    body = respond(app, tools=[LOOK], max_output_tokens=45).json()

    assert body["status"] == body["output"][0]["status"] == "incomplete"


def test_a_forced_call_follows_a_grammar():
    app, router = speaking(CALL)

    for choice in ("auto", "required", {"type": "function", "name": "look"}):
        assert respond(app, tools=[LOOK], tool_choice=choice).is_success

    assert ["grammar" in params for params in router.params] == [False, True, True]


def test_a_format_follows_a_grammar():
    app, router = speaking("{}")
    form = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}

    assert respond(app, text={"format": form}).is_success

    assert "grammar" in router.params[0]


def test_a_wrong_schema_is_named_by_the_field_of_this_dialect():
    app, _ = speaking("{}")
    form = {"type": "json_schema", "name": "x", "schema": {"type": 5}}

    message = refused(respond(app, text={"format": form}), 400, "request", "text")

    assert message.startswith("text.format")
