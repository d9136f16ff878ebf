"""HTTP as clients see it: bodies, events, statuses, and what a client that leaves takes along."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from itertools import pairwise
from typing import Any
from unittest.mock import AsyncMock

import httpx
import pytest

from disagg.engine.sequence import SamplingParams
from disagg.errors import CapacityError, ConfigError, PeerLostError, QueueFullError
from disagg.server import app as app_module
from disagg.server import choices as choices_module
from disagg.server import merge
from disagg.server import responses as responses_module
from disagg.server.app import create_app
from disagg.server.merge import merged
from disagg.server.output_text import TextDelta
from tests.server.conftest import KV, A, completions_of
from tests.server.visits import ask, assert_counted, chat, events, post, refused, send

FORM = {"Content-Type": "application/x-www-form-urlencoded"}  # what curl -d sends


def test_a_completion_has_the_shape_that_clients_know(app):
    body = post(app).json()

    assert body["object"] == "text_completion"
    assert body["model"] == "tiny"
    assert body["choices"] == [
        {"index": 0, "text": "abcd", "logprobs": None, "finish_reason": "length"}
    ]
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert "kv" not in body["choices"][0]


PARTS = [{"type": "text", "text": "ab"}, {"type": "text", "text": "xd"}]


@pytest.mark.parametrize("content", ["abxd", PARTS], ids=["text", "parts"])
@pytest.mark.parametrize("visit", [post, chat])
def test_a_prediction_reaches_the_router_as_tokens(visit, content, app, router):
    assert visit(app, prediction={"type": "content", "content": content}).is_success

    assert router.predictions == [(A, A + 1, A + 23, A + 3)]


def test_usage_says_how_much_of_a_prediction_came_true(app):
    prediction = {"type": "content", "content": "abxd"}

    usage = post(app, prediction=prediction, n=2).json()["usage"]

    details = {"accepted_prediction_tokens": 4, "rejected_prediction_tokens": 4}
    assert usage["completion_tokens_details"] == details


def test_a_stream_says_how_much_of_a_prediction_came_true_so_far(app):
    prediction = {"type": "content", "content": "abxd"}
    options = {"include_usage": True, "continuous_usage_stats": True}

    chunks = events(
        post(app, prediction=prediction, stream=True, stream_options=options).text
    )

    details = [chunk["usage"]["completion_tokens_details"] for chunk in chunks]
    accepted = [x["accepted_prediction_tokens"] for x in details]
    assert accepted == sorted(accepted)
    assert accepted[-1] == 2
    assert details[-1]["rejected_prediction_tokens"] == 2


def test_the_figures_of_the_hand_off_come_when_they_are_asked_for_and_there_are_any(
    app, router
):
    for router.kv in (KV, {}):
        assert post(app, kv=True).json()["choices"][0]["kv"] == router.kv
        streamed = events(post(app, kv=True, stream=True).text)
        assert [event["choices"][0].get("kv") for event in streamed][-1] == router.kv


def test_a_stream_has_every_token_then_the_usage_then_done(app):
    response = post(app, stream=True, stream_options={"include_usage": True})
    *chunks, usage = events(response.text)

    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["text"] for choice in choices) == "abcd"
    assert [choice["finish_reason"] for choice in choices][-2:] == [None, "length"]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 4
    assert len({chunk["id"] for chunk in [*chunks, usage]}) == 1
    assert all("usage" not in chunk for chunk in chunks)


def test_letters_of_a_special_token_do_not_stop_an_answer(router):
    app = create_app(completions_of(router, special_tokens=["cd"], vocab_size=257))

    answer = post(app, stop=["cd", "e"]).json()

    assert answer["choices"][0]["text"] == "abcd"
    ((_, params, _),) = router.asked
    assert params["stop_token_ids"] == [256]


def test_a_special_token_that_the_model_cannot_write_is_only_a_text(router):
    app = create_app(completions_of(router, special_tokens=["cd"], vocab_size=256))

    answer = post(app, stop=["cd"]).json()

    assert answer["choices"][0]["text"] == "ab"
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_a_stream_is_of_events_that_no_proxy_gathers(app):
    response = post(app, stream=True)

    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-accel-buffering"] == "no"


async def test_what_came_while_a_client_was_slow_is_one_piece():
    async def stream(text: str) -> AsyncGenerator[TextDelta]:
        for count, letter in enumerate(text, 1):
            yield TextDelta(letter, count, scores=((count, None),))

    deltas = [each async for each in merged([stream("ab"), stream("c")])]
    both, one = ((1, None), (2, None)), ((1, None),)
    assert deltas == [
        (0, TextDelta("ab", 2, scores=both)),
        (1, TextDelta("c", 1, scores=one)),
    ]


async def test_what_several_answers_add_for_a_slow_client_is_one_piece_each():
    """Else what waits would grow with every token of every answer."""

    async def stream(text: str) -> AsyncGenerator[TextDelta]:
        for count, letter in enumerate(text, 1):
            yield TextDelta(letter, count)
            await asyncio.sleep(0)

    async with aclosing(merged([stream("abc"), stream("xyz")])) as deltas:
        first = await anext(deltas)
        for _ in range(10):
            await asyncio.sleep(0)  # the client is slow
        rest = [each async for each in deltas]

    assert first == (0, TextDelta("a", 1))
    assert rest == [(1, TextDelta("xyz", 3)), (0, TextDelta("bc", 3))]


SAMPLING = {
    "temperature": 2.0,
    "top_p": 0.5,
    "min_p": 0.25,
    "presence_penalty": 1.0,
    "frequency_penalty": -1.0,
    "repetition_penalty": 1.5,
    "min_tokens": 2,
    "seed": 9,
    "stop_token_ids": [199],
    "ignore_eos": True,
}


@pytest.mark.parametrize("ask", [post, chat])
def test_what_is_asked_reaches_the_router(ask, app, router):
    ask(app, **SAMPLING, codec="kivi", top_k=-1, logit_bias={"5": -3})
    ((_, params, codec),) = router.asked
    assert params == SAMPLING | {"max_tokens": 4, "top_k": 0, "logit_bias": [(5, -3.0)]}
    assert codec == "kivi"
    assert SamplingParams(**params)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("ask", "most"), [(post, 2**31 - 1), (chat, 2**31 - 1), (chat, None)]
)
def test_an_answer_ends_with_the_context_and_says_so(ask, most, stream, app, router):
    options = {"stream": stream, "stream_options": {"include_usage": True}}
    response = ask(app, max_tokens=most, **options)
    bodies = events(response.text)[-2:] if stream else [response.json()] * 2
    assert bodies[0]["choices"][0]["finish_reason"] == "length"
    assert bodies[1]["usage"]["total_tokens"] == 20
    ((prompt, params, _),) = router.asked
    assert params["max_tokens"] == 20 - len(prompt)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_answer_and_frees_the_workers(stream, app, router):
    router.pause_at = 4
    response = post(app, max_tokens=9, stop=["zz", "cd"], stream=stream, kv=True)
    chunks = events(response.text) if stream else [response.json()]
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["text"] for choice in choices) == "ab"
    assert choices[-1]["finish_reason"] == "stop"
    assert choices[-1]["kv"] == KV
    assert router.running == 0


@pytest.mark.parametrize(("ignored", "text"), [(False, "ab"), (True, "abc")])
def test_the_token_that_ends_a_text_is_not_shown(ignored, text, router):
    app = create_app(completions_of(router, eos_ids=(A + 2,)), token="secret")
    answer = post(app, max_tokens=3, ignore_eos=ignored).json()
    assert answer["choices"][0]["text"] == text
    assert answer["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["plain", "marked"])
def test_the_body_counts_and_not_its_content_type(mark, app):
    content = mark + json.dumps(ask()).encode()
    answer = send(app, "POST", "/v1/completions", content=content, headers=FORM)

    assert answer.status_code == 200


def test_a_form_is_refused_as_no_json(app):
    content = b"prompt=abc"
    answer = send(app, "POST", "/v1/completions", content=content, headers=FORM)

    assert "JSON" in refused(answer, 400, "request")


REFUSALS = [
    (ConfigError("unknown codec 'zip'"), 400, "config", {None}),
    (CapacityError("full"), 503, "capacity", {"1", "2"}),  # come back later, and when
    (QueueFullError("1,024 wait"), 429, "queue_full", {"1", "2"}),
    (PeerLostError("gone"), 503, "peer_lost", {"1", "2"}),
    (ZeroDivisionError("a secret"), 500, "internal", {None}),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("error", "status", "reason", "later"), REFUSALS)
def test_what_is_refused_has_a_status_and_a_request_id_and_tells_no_secret(
    error, status, reason, later, stream, app, router
):
    router.refuses = error
    response = post(app, raises=False, stream=stream)
    assert refused(response, status, reason)
    assert response.headers.get("retry-after") in later
    assert len(response.headers["x-request-id"]) == 32
    assert "secret" not in response.text


def test_a_codec_that_workers_refuse_is_told_by_its_field(app, router):
    router.refuses = ConfigError("unknown codec 'zip'")
    params = [
        post(app, **fields).json()["error"]["param"]
        for fields in ({}, {"codec": "zip"})
    ]
    assert params == [None, "codec"]


def test_an_error_in_mid_stream_is_an_event(app, router):
    router.pause_at, router.breaks = 2, PeerLostError("gone")
    router.go.set()
    *_, last = events(post(app, max_tokens=9, stream=True).text)
    assert last["error"]["type"] == "peer_lost"


WAITING = ": waiting"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may arrive for no time at all before a stream says that it waits."""
    monkeypatch.setattr(merge, "FIRST_WAIT_S", 0.0)
    monkeypatch.setattr(merge, "WAIT_S", 0.0)


def stream_until(app: Any, is_enough: Callable[[str], bool], then: Any) -> str:
    """A streamed answer; `then` is called once its beginning is enough."""
    body = json.dumps(ask(stream=True)).encode()
    arrived = iter([{"type": "http.request", "body": body, "more_body": False}])
    text = ""

    async def receive() -> dict[str, Any]:
        for message in arrived:
            return message
        await asyncio.Event().wait()
        raise AssertionError

    async def sent(message: Any) -> None:
        nonlocal text
        text += str(message.get("status", "")) + message.get("body", b"").decode()
        if is_enough(text):
            then()

    async def scene() -> None:
        async with asyncio.timeout(30):
            await app(SCOPE, receive, sent)

    asyncio.run(scene())
    return text


def test_a_stream_that_waits_begins_and_says_so(app, router, impatient):
    """Proxies close a connection that is silent for a minute."""
    router.pause_at = 0

    text = stream_until(app, lambda text: text.count(WAITING) == 2, router.go.set)

    assert text.startswith(f"200{WAITING}\n\n{WAITING}\n\n")
    chunks = events(text.replace(WAITING, "").removeprefix("200"))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "abcd"


def test_an_event_behind_a_wait_does_not_need_the_line_break_of_the_wait(
    app, router, impatient
):
    """vLLM's client strips each piece that it reads."""
    router.pause_at = 0
    texts = [""]

    def is_enough(text: str) -> bool:
        texts.append(text)
        return text.count(WAITING) == 2

    stream_until(app, is_enough, router.go.set)

    pieces = [text[len(before) :] for before, text in pairwise(texts)]
    behind = [
        piece.strip()
        for before, piece in pairwise(pieces)
        if before.startswith(WAITING) and "data: {" in piece and "data: " not in before
    ]
    assert behind
    assert all(piece.startswith(f"{WAITING}\n\ndata: ") for piece in behind)


def test_an_error_after_a_wait_is_an_event(app, router, impatient):
    router.pause_at = 0
    router.breaks = QueueFullError("no room")

    text = stream_until(app, lambda text: WAITING in text, router.go.set)

    *_, last = events(text.replace(WAITING, "").removeprefix("200"))
    assert last["error"] == {
        "message": "no room",
        "type": "queue_full",
        "param": None,
        "code": 429,
    }


def test_an_answer_that_is_not_streamed_is_written_when_it_is_whole(
    app, router, impatient
):
    router.refuses = QueueFullError("no room")

    assert refused(post(app), 429, "queue_full")


@pytest.mark.parametrize("ask", [post, chat])
def test_a_long_answer_is_written_in_pieces(ask, app, monkeypatch):
    fields = {"n": 2, "logprobs": 2}
    if ask is chat:
        fields = {"n": 2, "logprobs": True, "top_logprobs": 2}
    whole = ask(app, **fields)

    monkeypatch.setattr(app_module, "MAX_PIECE", 10)
    monkeypatch.setattr(choices_module, "MAX_PIECE", 10)
    in_pieces = ask(app, **fields)

    names = {"id", "created"}
    expected, body = whole.json(), in_pieces.json()
    assert {key: body[key] for key in body.keys() - names} == {
        key: expected[key] for key in expected.keys() - names
    }
    assert "content-length" in whole.headers
    assert "content-length" not in in_pieces.headers


@pytest.mark.parametrize("stream", [False, True])
def test_many_log_probabilities_are_written_in_parts(stream, app, monkeypatch):
    fields = {"logprobs": 1, "echo": True, "stream": stream}
    expected = scores_of(post(app, **fields))

    monkeypatch.setattr(responses_module, "MAX_CHUNK_SCORES", 2)

    assert scores_of(post(app, **fields)) == expected


def scores_of(response: httpx.Response) -> tuple[str, list[str], list[int], str]:
    """Text, tokens, offsets and end of an answer; of a stream, all its chunks together."""
    is_stream = response.headers["content-type"].startswith("text/event-stream")
    chunks = events(response.text) if is_stream else [response.json()]
    choices = [chunk["choices"][0] for chunk in chunks]
    logprobs = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    return (
        "".join(choice["text"] for choice in choices),
        [token for each in logprobs for token in each["tokens"]],
        [offset for each in logprobs for offset in each["text_offset"]],
        choices[-1]["finish_reason"],
    )


def test_a_delta_is_cut_by_its_log_probabilities():
    scores = tuple((token, None) for token in range(5))
    delta = TextDelta("abc", 7, finish_reason="stop", scores=scores)

    parts = [*delta.slices(2)]

    assert [part.text for part in parts] == ["abc", "", "", ""]
    assert [len(part.scores) for part in parts] == [2, 2, 1, 0]
    assert [part.finish_reason for part in parts] == [None, None, None, "stop"]
    assert [len(part.scores) for part in delta.slices(5)] == [5, 0]


def test_a_delta_that_one_chunk_can_carry_is_not_cut():
    delta = TextDelta("abc", 7, scores=((1, None), (2, None)))

    assert [*delta.slices(2)] == [delta]


def test_a_text_at_the_end_has_a_chunk_before_the_finish_reason():
    pieces = [*TextDelta("abc", 7, finish_reason="stop", kv=KV).slices(9)]

    assert [(piece.text, piece.finish_reason) for piece in pieces] == [
        ("abc", None),
        ("", "stop"),
    ]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/nowhere", 404),
        ("GET", "/stop", 405),
    ],
)
def test_what_is_not_there_has_the_body_of_an_error_too(method, path, status, app):
    assert f"{method} {path}" in refused(send(app, method, path), status, "not_found")


@pytest.mark.parametrize("path", ["/health", "/nowhere", "/v1/models"])
def test_every_response_can_be_found_again_by_its_request_id(path, app):
    def name(headers: dict[str, str]) -> str:
        return send(app, "GET", path, headers=headers).headers["x-request-id"]

    assert name({"X-Request-Id": "mine-7"}) == "mine-7"
    assert name({}) != name({})
    assert len(name({"X-Request-Id": "x" * 1000})) == 32


SCOPE = {
    "type": "http",
    "asgi": {"version": "3.0", "spec_version": "2.3"},
    "http_version": "1.1",
    "method": "POST",
    "path": "/v1/completions",
    "raw_path": b"/v1/completions",
    "query_string": b"",
    "headers": [(b"content-type", b"application/json")],
}


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_takes_its_request_along(stream, app, router):
    """Spoken to as a web server would, because the client library cannot leave in the middle."""
    router.pause_at = 2
    body = json.dumps(ask(max_tokens=9, stream=stream)).encode()
    arrived = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> dict[str, Any]:
        for message in arrived:
            return message
        while not router.paused.is_set():
            await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    async def scene() -> None:
        async with asyncio.timeout(30):
            await app(SCOPE, receive, AsyncMock())  # type: ignore[arg-type]
        assert router.running == 0

    asyncio.run(scene())
    assert_counted(app, {"disagg_request_failures_total{reason=cancelled}": 1})


def test_a_client_that_leaves_in_mid_body_is_no_failure(app):
    part = {"type": "http.request", "body": b'{"pro', "more_body": True}
    receive, send = (
        AsyncMock(side_effect=[part, {"type": "http.disconnect"}]),
        AsyncMock(),
    )
    asyncio.run(app(SCOPE, receive, send))
    assert send.call_args_list[0].args[0]["status"] == 499


def test_a_token_is_spelled_once_however_often_it_is_told(
    app, completions, monkeypatch
):
    decoded, decode = [], completions.tokenizer.decode

    def spelled(ids: list[int], special: bool = False) -> str:
        decoded.extend([ids] if special else ())  # else it is of the text of the answer
        return decode(ids, special)

    monkeypatch.setattr(completions.tokenizer, "decode", spelled)
    answer = chat(app, logprobs=True, top_logprobs=2, n=8).json()
    content = answer["choices"][7]["logprobs"]["content"]
    assert [token["token"] for token in content] == ["a", "b", "c", "d"]
    assert sorted(map(len, decoded)) == [1] * 5 + [2] * 5  # those, and one beside each


def test_a_token_is_spelled_as_behind_others_where_a_text_loses_its_first_space(
    completions,
):
    tokenizer = completions.tokenizer
    tokenizer.decode = lambda ids, special: "".join(" upon" for _ in ids).lstrip()
    assert tokenizer.spell(1) == " upon"
